"""Sets up everything a checkout runs in and prints the interpreter's path as the last line.

Two layers, because the pinned requirements take 11 GB:

* shared: a virtual environment under ``$VERICACHE_HOME/venvs`` (default
  ``~/.cache/sglang-vericache``), one for each content of ``requirements/`` and Python version.
  Any number of checkouts use it; none is installed into it.
* checkout: ``.venv``, a few megabytes. It sees the shared packages, this checkout's two packages,
  their entry points and console scripts, and holds ``requirements/checkout``. The C++ kernels are
  built inside the checkout, and kept under ``$VERICACHE_HOME/kernels`` by a hash of their sources.

Each part is skipped when it is up to date. Runs with the standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
REQUIREMENTS = sorted((REPO / "requirements").glob("*.txt"))
CHECKOUT_REQUIREMENTS = REPO / "requirements" / "checkout" / "kvpress.txt"
KERNELS = REPO / "sgl-kernel-ext"
OVERLAY = REPO / ".venv"
SITE = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
COMPLETE = ".complete"


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - any python3 may start this
        sys.exit(f"Python 3.11 or newer is needed, this is {platform.python_version()}")
    home = Path(os.environ.get("VERICACHE_HOME") or "~/.cache/sglang-vericache").expanduser()
    shared = ensure_shared(home.resolve() / "venvs")
    (REPO / ".cache").mkdir(exist_ok=True)
    with locked(REPO / ".cache" / "env.lock"):
        ensure_overlay(shared)
        ensure_kernels(shared, home.resolve() / "kernels")
    print(OVERLAY / "bin" / "python")


def ensure_shared(venvs: Path) -> Path:
    """The complete shared environment for these requirements; builds it if needed."""
    venv = venvs / digest(REQUIREMENTS, python_identity())
    venvs.mkdir(parents=True, exist_ok=True)
    with locked(venvs / f"{venv.name}.lock"):
        if (venv / COMPLETE).exists():
            return venv
        if venv.exists():
            say(f"{venv} was left half-built; building it again")
            shutil.rmtree(venv)
        say(f"creating {venv} (once for these requirements: about 11 GB and 4 minutes)")
        run([sys.executable, "-m", "venv", str(venv)])
        pins = [line for path in REQUIREMENTS for line in path.read_text().splitlines()]
        total = sum("==" in line for line in pins)
        pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        files = [f"--requirement={path}" for path in REQUIREMENTS]
        with heartbeat(venv / SITE, total):
            # Every package of the closure is pinned, so there is nothing to resolve.
            run([*pip, "install", "--no-deps", "--no-compile", *files])
        run([*pip, "check"])
        say("compiling bytecode")
        compileall = [str(venv / "bin" / "python"), "-m", "compileall", "-qq", "-j", "0"]
        # Some packages ship files that are no valid Python on purpose (templates, old syntax).
        subprocess.run([*compileall, str(venv / SITE)], stdout=sys.stderr)
        (venv / COMPLETE).touch()
    return venv


def ensure_overlay(shared: Path) -> None:
    """``.venv`` of this checkout on top of the shared environment."""
    stamp = OVERLAY / COMPLETE
    names = ["pyproject.toml", "setup.py", "sgl-kernel-ext/pyproject.toml"]
    names += ["python/sglang_vericache.pth", "python/sglang_vericache/__init__.py"]
    inputs = [Path(__file__), CHECKOUT_REQUIREMENTS, *(REPO / name for name in names)]
    wanted = digest(inputs, str(shared), str(REPO))
    if stamp.exists() and stamp.read_text() == wanted:
        return
    say(f"creating {OVERLAY}")
    shutil.rmtree(OVERLAY, ignore_errors=True)
    run([str(shared / "bin" / "python"), "-m", "venv", "--without-pip", str(OVERLAY)])
    site = OVERLAY / SITE
    # Not a plain path line: that would skip the .pth files inside the shared directory.
    (site / "shared.pth").write_text(f"import site; site.addsitedir({str(shared / SITE)!r})\n")
    (site / "sgl_kernel_ext.pth").write_text(f"{KERNELS}\n")
    python = str(OVERLAY / "bin" / "python")
    run([python, "setup.py", "-q", "egg_info"], cwd=KERNELS)
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    run([python, *install, "--editable", str(REPO)])
    compared = [python, *install, "--requirement", str(CHECKOUT_REQUIREMENTS)]
    if subprocess.run(compared, stdout=sys.stderr).returncode != 0:
        say("WARNING: kvpress could not be installed; tests that compare with it are skipped")
    # The shared `sglang` command would start the shared interpreter, which knows no plugin.
    script = OVERLAY / "bin" / "sglang"
    text = (shared / "bin" / "sglang").read_text()
    script.write_text(f"#!{python}\n" + text.split("\n", 1)[1])
    script.chmod(0o755)
    for tool in ("hadolint", "ninja"):  # programs, not Python scripts
        (OVERLAY / "bin" / tool).symlink_to(shared / "bin" / tool)
    stamp.write_text(wanted)


def ensure_kernels(shared: Path, cache: Path) -> None:
    """Compiled kernels of this checkout's sources, inside ``sgl-kernel-ext/sgl_kernel_ext``."""
    sources = [KERNELS / "setup.py", *sorted((KERNELS / "csrc").rglob("*.*"))]
    wanted = digest(sources, shared.name)
    stamp = OVERLAY / ".kernels"
    package = KERNELS / "sgl_kernel_ext"
    pattern = f"_C*{sysconfig.get_config_var('EXT_SUFFIX')}"
    if stamp.exists() and stamp.read_text() == wanted and any(package.glob(pattern)):
        return
    for stale in package.glob(pattern):
        stale.unlink()
    cached = cache / wanted
    if not cached.exists():
        say("building sgl-kernel-ext (once for these sources: a few minutes on 2 cores)")
        if not build_kernels():
            if os.environ.get("VERICACHE_REQUIRE_KERNELS") == "1":
                sys.exit("building sgl-kernel-ext failed, see above")
            say("WARNING: sgl-kernel-ext could not be built (see above).")
            say("WARNING: servers will run on its torch reference: same results, much slower.")
            return
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=cache))
        for built in package.glob(pattern):
            shutil.copy2(built, scratch)
        with contextlib.suppress(OSError):  # another checkout stored the same build meanwhile
            scratch.rename(cached)
    for built in cached.glob(pattern):
        shutil.copy2(built, package)
    stamp.write_text(wanted)


def build_kernels() -> bool:
    env = os.environ | {"PATH": f"{OVERLAY / 'bin'}:{os.environ['PATH']}"}
    env.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
    command = [str(OVERLAY / "bin" / "python"), "setup.py", "build_ext", "--inplace"]
    return subprocess.run(command, cwd=KERNELS, env=env, stdout=sys.stderr).returncode == 0


def digest(files: Iterable[Path], *extra: str) -> str:
    """Hash of names and contents of ``files`` and of ``extra``: 16 hexadecimal digits."""
    state = hashlib.sha256()
    for part in extra:
        state.update(part.encode() + b"\0")
    for path in files:
        state.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return state.hexdigest()[:16]


def python_identity() -> str:
    return f"{platform.python_implementation()} {platform.python_version()} {platform.machine()}"


def run(command: list[str], cwd: Path | None = None) -> None:
    """Run a command with its output on stderr; exit with its status if it fails."""
    result = subprocess.run(command, cwd=cwd, stdout=sys.stderr)
    if result.returncode != 0:
        say(f"failed: {' '.join(command)}")
        sys.exit(result.returncode)


@contextlib.contextmanager
def heartbeat(site: Path, total: int, seconds: float = 15) -> Iterator[None]:
    """Report the packages unpacked so far: pip is silent while it installs."""
    done = threading.Event()
    start = time.monotonic()

    def report() -> None:
        while not done.wait(seconds):
            count = sum(1 for _ in site.glob("*.dist-info"))
            say(f"{time.monotonic() - start:.0f} s: {count} of about {total} packages installed")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; say so if another process has it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another set-up ({path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    print(f"[env] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
