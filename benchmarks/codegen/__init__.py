"""What can be told about a kernel without running it on a GPU: machine code of real targets, and bytes moved."""
