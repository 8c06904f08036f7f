"""The test suites of timm and transformers with fastvit in them: `make peers`."""
