"""Switch cuDNN off once torch is imported: there are only stubs of it. A .pth file imports this where Python starts."""

import importlib.abc
import importlib.util
import sys


class AfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.backends.cudnn.enabled = False

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, AfterTorch())
