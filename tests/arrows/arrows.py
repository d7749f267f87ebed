"""The arrows between the folders of src/: who may include whom, and what the pure folders may not touch.

`arrows.py SRC` prints one line per broken rule and ends with 1 if there are any. The rules stand in the tables below.
Files named *_test.cc may look at everything but tools, and may do I/O and test features: they are not part of the library.
"""

import pathlib
import re
import sys

# folder -> the folders that it may include (itself always). a <- b: b may include a.
ARROWS = {
    "base": set(),
    "geometry": {"base"},
    "plan": {"base", "geometry"},
    "bind": {"base", "geometry", "plan"},
    "transport": {"base"},
    "landing": {"base", "geometry"},
    "session": {"base", "geometry", "plan", "bind", "transport", "landing"},
    "pool": {"base", "geometry"},
    "collective": {"base", "transport"},
    "attention": {"base", "geometry"},
    "sim": {"base", "geometry", "plan", "bind", "transport", "landing", "session", "pool", "collective"},
}
ARROWS["tools"] = set(ARROWS)

# These folders are functions of values: no I/O, no threads, no clock, no CUDA.
PURE = {"geometry", "plan", "bind"}
IMPURE_HEADER = re.compile(
    r"^(thread|stop_token|mutex|shared_mutex|condition_variable|future|semaphore|latch|barrier|atomic"
    r"|chrono|ctime|time\.h"
    r"|fstream|iostream|syncstream|filesystem|cstdio|stdio\.h|csignal|signal\.h"
    r"|unistd\.h|fcntl\.h|poll\.h|dlfcn\.h|dirent\.h|pthread\.h|sched\.h|spawn\.h|(sys|netinet|arpa|net|linux|asm)/.*"
    r"|fmt/(os|chrono)\.h|kvloom/base/clock\.h"
    r"|(.*/)?(cuda|cudart|nvml|cupti|driver_types|vector_types).*)$"
)

# For .cc files only; not installed.
INTERNAL_HEADERS = {"base/flat_root.h"}

# An installed header may need nothing that find_package(kvloom) does not bring.
PRIVATE_HEADER = re.compile(r"^((nlohmann|flatbuffers|prometheus|CLI|ucp|ucs|uct|gtest|gmock|rapidcheck|benchmark)/.*|xxhash\.h|zmq.*|.*_generated\.h)$")

# Feature tests belong in the folder of one transport or of one kernel, where CMake picks files.
FEATURE_FOLDER = re.compile(r"^(transport|attention)/[^/]+/")
CONDITION = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif)\b(.*)$")

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
OURS = re.compile(r"^kvloom/([^/]+)/.+")
COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


def without_comments(text):
    """Strings stay, comments become as many empty lines as they had."""
    return COMMENT.sub(lambda m: m.group() if m.group()[0] == '"' else "\n" * m.group().count("\n"), text)


def broken_by_include(place, quote, path, is_test):
    folder, name = place.split("/")[0], place.split("/")[-1]
    ours = OURS.match(path)
    if quote == "<" and path.startswith("kvloom/"):
        return [("form", f'<{path}>: our own headers stand in quotes, "kvloom/<folder>/<file>.h"')]
    if quote == '"' and not ours and not (is_test and path.startswith("tests/")):
        return [("form", f'"{path}": write "kvloom/<folder>/<file>.h"; headers of others stand in <>')]
    broken = []
    if ours:
        target = ours.group(1)
        if target == "tools" and folder != "tools":
            broken.append(("tools", f"{path}: nobody includes tools"))
        elif target not in ARROWS:
            broken.append(("arrow", f"{path}: the folder {target} is not in the table of arrows"))
        elif target != folder and target not in ARROWS[folder] and not is_test:
            broken.append(("arrow", f"{path}: {folder} may include {', '.join(sorted(ARROWS[folder])) or 'nothing'}, not {target}"))
    if folder in PURE and not is_test and IMPURE_HEADER.match(path):
        broken.append(("pure", f"<{path}>: {folder} does no I/O and has no threads, clock or CUDA"))
    if ours and path.removeprefix("kvloom/") in INTERNAL_HEADERS and name.endswith(".h"):
        broken.append(("private", f"{path}: for .cc files only"))
    if folder != "tools" and name.endswith(".h") and place not in INTERNAL_HEADERS and PRIVATE_HEADER.match(path):
        broken.append(("private", f"<{path}>: an installed header must not need it; include it in the .cc"))
    return broken


def broken_in_file(place, text):
    """place: the path under src/. Gives (line, rule, sentence)."""
    folder, name = place.split("/")[0], place.split("/")[-1]
    is_test = name.endswith("_test.cc")
    if folder not in ARROWS:
        return [(1, "arrow", f"the folder {folder} is not in the table of arrows")]
    broken = []
    for number, line in enumerate(without_comments(text).split("\n"), 1):
        include, condition = INCLUDE.match(line), CONDITION.match(line)
        if include:
            broken += [(number, *b) for b in broken_by_include(place, *include.groups(), is_test)]
        if condition and not is_test and not FEATURE_FOLDER.match(place) and condition.group(2).strip() != "NDEBUG":
            broken.append((number, "feature", f"#{condition.group(1)}{condition.group(2)}: only inside one transport's or kernel's folder"))
        if folder != "tools" and not is_test and re.search(r"\bgetenv\s*\(", line):
            broken.append((number, "environment", "getenv: the environment is read in tools only"))
    return broken


def broken_in_tree(src):
    src = pathlib.Path(src)
    files = sorted(p for p in src.rglob("*") if p.suffix in {".h", ".cc", ".cu", ".cuh"})
    found = []
    for path in files:
        place = path.relative_to(src).as_posix()
        if "/" not in place:
            found.append((place, 1, "arrow", "files stand in a folder of src/"))
            continue
        found += [(place, *b) for b in broken_in_file(place, path.read_text(encoding="utf-8"))]
    return found, len(files)


def main():
    broken, files = broken_in_tree(sys.argv[1])
    for place, line, rule, sentence in broken:
        print(f"src/{place}:{line}: [{rule}] {sentence}")
    print(f"arrows: {files} files, {len(broken)} broken rules")
    return 1 if broken or files == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
