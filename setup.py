"""Adds ``sglang_vericache.pth`` to the installed files; everything else is in pyproject.toml.

Python runs a ``.pth`` file of site-packages at every start. On a CPU without AMX that is the one
moment early enough, in SGLang's launcher as in the processes it spawns: see
``sglang_vericache/platform/bootstrap.py``.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PTH = "sglang_vericache.pth"


class BuildWithPth(build_py):
    """Puts the ``.pth`` file beside the package, where only site-packages itself is searched."""

    def run(self) -> None:
        super().run()
        source = Path(__file__).with_name("python") / PTH
        if self.editable_mode:  # the package stays here, the file must not
            target = self.get_finalized_command("install").install_lib
        else:
            target = self.build_lib
        self.mkpath(target)
        self.copy_file(str(source), str(Path(target) / PTH))


setup(cmdclass={"build_py": BuildWithPth})
