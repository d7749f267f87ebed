"""Puts the licences of the libraries that a wheel bundles into it: kvloom-VERSION.dist-info/licenses/LIBRARY/copyright.

    python scripts/wheel_licences.py WHEEL        # in place; needs the package `wheel`, and the Debian packages that the libraries are of

auditwheel copies libraries of this system into a wheel, and with them the duty to say whose they are. On Debian each package has that in
/usr/share/doc/PACKAGE/copyright.  Fails, and leaves the wheel as it was, where the licence of one can't be found.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile


def package_of(library: str) -> str:
    """The Debian package that has the file. @error none: what to do."""
    name = re.sub(r"-[0-9a-f]{8}(?=\.)", "", library, count=1)  # auditwheel adds a part of a hash
    for folder in ("/usr/lib", "/lib"):
        for found in sorted(pathlib.Path(folder).rglob(name)):
            for path in (found, pathlib.Path("/", *found.parts[2:]) if found.parts[1] == "usr" else found):
                answer = subprocess.run(["dpkg", "-S", str(path)], capture_output=True, text=True)
                if answer.returncode == 0:
                    return answer.stdout.split(":")[0]
    raise SystemExit(f"{library}: no Debian package has {name}; link it statically, or say its licence in scripts/wheel_licences.py")


def licence_of(package: str) -> pathlib.Path:
    file = pathlib.Path("/usr/share/doc", package, "copyright")
    if not file.exists():
        raise SystemExit(f"{file} is not there: this image leaves documentation out (/etc/dpkg/dpkg.cfg.d); install {package} anew without that")
    return file


def wheel(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "wheel", *words], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    file = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        wheel("unpack", "-d", scratch, str(file))
        (root,) = pathlib.Path(scratch).iterdir()
        (info,) = root.glob("*.dist-info")
        packages = {package_of(library.name) for library in root.glob("*.libs/*")}
        for package in sorted(packages):
            (info / "licenses" / package).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(licence_of(package), info / "licenses" / package / "copyright")
        wheel("pack", "-d", scratch, str(root))
        pathlib.Path(scratch, file.name).replace(file)
    print(f"{file.name}: licences of {', '.join(sorted(packages))}")


if __name__ == "__main__":
    main()
