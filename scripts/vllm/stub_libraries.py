"""Lets PyPI's torch, a CUDA build, load on a machine without CUDA: libraries that it asks for and nobody has are made.

stub_libraries.py FOLDER     FOLDER: where libtorch_cuda.so lies; needs gcc and readelf.

The wheel of torch links about fifteen NVIDIA libraries, 2 GB of wheels of their own. On a CPU none of their functions is ever
called, but the loader wants to see every name. So for each library that is asked for and not there, one is compiled that defines
the names expected of it. All of them are one function, which answers 999 (cudaErrorUnknown).

Where a name belongs, the files say themselves: their version needs (`readelf -V`) pair a version with the library that defines
it. Names without a version may stand in any library of the process, so they all go into the first one.
Not made: libcudart, which is small and says correctly that there is no device; libcuda, which is looked for, not linked.
"""

import pathlib
import re
import subprocess
import sys
import tempfile
from collections import defaultdict

NOT_MADE = re.compile(r"^lib(cudart|cuda)\.so")
MADE = re.compile(r"^lib(cu|nv|nccl)")
Symbol = tuple[str, str, bool]  # name, version ("" for none), whether it is data


def readelf(*arguments: str) -> list[str]:
    """The lines that readelf prints. @error it fails: CalledProcessError."""
    return subprocess.run(["readelf", "-W", *arguments], capture_output=True, text=True, check=True).stdout.splitlines()


def needed_by(library: pathlib.Path) -> set[str]:
    """The sonames that `library` asks for."""
    return {found[1] for line in readelf("-d", str(library)) if (found := re.search(r"\(NEEDED\).*\[(.+)\]", line))}


def versions_needed(library: pathlib.Path) -> dict[str, str]:
    """Which soname defines each version that `library` needs: version -> soname."""
    owner, soname = {}, ""
    for line in readelf("-V", str(library)):
        if found := re.search(r"\bFile: (\S+)", line):
            soname = found[1]
        if found := re.search(r"\bName: (\S+)\s+Flags", line):
            owner[found[1]] = soname
    return owner


def symbols(library: pathlib.Path) -> tuple[set[str], set[Symbol]]:
    """The names that `library` defines, and those it expects elsewhere. Weak expectations may stay open and are left out."""
    defined, expected = set(), set()
    for line in readelf("--dyn-syms", str(library)):
        column = line.split()
        if len(column) < 8 or not column[0].rstrip(":").isdigit():
            continue
        kind, binding, section, name = column[3], column[4], column[6], column[7]
        name, _, version = name.partition("@")
        if section != "UND":
            defined.add(name)
        elif binding == "GLOBAL":
            expected.add((name, version.lstrip("@"), kind == "OBJECT"))
    return defined, expected


def expected_of(libraries: list[pathlib.Path], missing: list[str]) -> dict[str, set[Symbol]]:
    """What each missing library has to define: soname -> symbols."""
    owner: dict[str, str] = {}
    defined: set[str] = set()
    expected: set[Symbol] = set()
    for library in libraries:
        owner |= versions_needed(library)
        here, elsewhere = symbols(library)
        defined |= here
        expected |= elsewhere
    wanted = defaultdict(set)
    for symbol in expected:
        name, version, _ = symbol
        if version and owner.get(version) in missing:
            wanted[owner[version]].add(symbol)
        elif not version and name not in defined:
            wanted[missing[0]].add(symbol)
    return wanted


def source_of(wanted: set[Symbol]) -> tuple[str, str]:
    """C source and linker version script that define `wanted`."""
    lines = ["int nothing_here(void) { return 999; }"]
    versions = defaultdict(list)
    for name, version, is_data in sorted(wanted):
        lines.append(f"char {name}[4096];" if is_data else f'int {name}(void) __attribute__((alias("nothing_here")));')
        if version:
            versions[version].append(name)
    script = "".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in sorted(versions.items()))
    return "\n".join(lines) + "\n", script


def make(folder: pathlib.Path, soname: str, wanted: set[Symbol]) -> None:
    """Compile `soname` into `folder`. @error the compiler refuses: CalledProcessError, its words on stderr."""
    code, versions = source_of(wanted)
    with tempfile.TemporaryDirectory() as scratch:
        source, script = pathlib.Path(scratch, "stub.c"), pathlib.Path(scratch, "stub.map")
        source.write_text(code)
        script.write_text(versions)
        command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{soname}", "-o", str(folder / soname), str(source)]
        subprocess.run(command + ([f"-Wl,--version-script={script}"] if versions else []), check=True)
    print(f"  {soname}: {len(wanted)} names")


def main() -> int:
    folder = pathlib.Path(sys.argv[1])
    libraries = sorted(folder.glob("*.so*"))
    there = {library.name for library in libraries}
    asked_for = set().union(*(needed_by(library) for library in libraries))
    missing = sorted(name for name in asked_for - there if MADE.match(name) and not NOT_MADE.match(name))
    if not missing:
        print("  no library is missing")
        return 0
    wanted = expected_of(libraries, missing)
    for soname in missing:
        make(folder, soname, wanted[soname])
    return 0


if __name__ == "__main__":
    sys.exit(main())
