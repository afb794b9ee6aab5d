"""What pyproject.toml cannot say: packages carry the native library, compiled by kvtier/cpu/build.py.

Without a compiler the package is pure Python, and attention on the host runs on torch. The environment variable
KVTIER_REQUIRE_NATIVE=1 makes that an error.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent

# By path: kvtier need not be importable while it is built.
_spec = importlib.util.spec_from_file_location("kvtier_cpu_build", ROOT / "kvtier" / "cpu" / "build.py")
assert _spec is not None
assert _spec.loader is not None
native = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(native)


class BuildNative(Command):
    """Put the library where it is packaged from; for an editable install, into the source tree."""

    description = "compile the native library"
    user_options = ()

    def initialize_options(self) -> None:
        self.editable_mode = False
        self.build_lib = None
        self.compiled = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        packaged = Path(self.build_lib, native.TARGET.relative_to(ROOT))
        try:
            if self.editable_mode:
                native.update()
            elif os.access(native.TARGET.parent, os.W_OK):
                # Into the tree too: whoever runs Python in it imports what is there, not what is installed.
                native.update()
                packaged.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(native.TARGET, packaged)
            else:
                native.build(packaged)
            self.compiled = True
        except native.BuildError as error:
            message = f"kvtier: the native kernel was not compiled: {error}"
            if os.environ.get("KVTIER_REQUIRE_NATIVE", "0") not in ("", "0"):
                raise CompileError(message) from error
            # An earlier build may have left one, and all that lies there is packaged.
            packaged.unlink(missing_ok=True)
            print(f"{message}\nkvtier goes on without it: attention on the host will run on torch.", file=sys.stderr)

    def get_source_files(self) -> list[str]:
        # For source distributions.
        return [str(f.relative_to(ROOT)) for f in sorted(native.SOURCE.iterdir()) if f.suffix in (".h", ".cpp")]

    def get_outputs(self) -> list[str]:
        return [str(Path(self.build_lib, native.TARGET.relative_to(ROOT)))] if self.compiled else []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Wheel(bdist_wheel):
    """A wheel for every Python, and for this platform if it holds the library: ctypes loads that, no Python ABI."""

    def run(self) -> None:
        if not self.skip_build:
            self.run_command("build")
            if self.get_finalized_command("build_native").compiled:
                # Only now is it known. These two decide where files go, and the tag.
                self.root_is_pure = False
                self.distribution.has_ext_modules = lambda: True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


build.sub_commands.append(("build_native", None))
setup(cmdclass={"build_native": BuildNative, "bdist_wheel": Wheel})
