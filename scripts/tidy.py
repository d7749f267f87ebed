#!/usr/bin/env python3
"""tidy.py BUILD [--jobs N] [--tests] [FILE...]: clang-tidy over our .cc files, as errors.

A build in batches (KVLOOM_UNITY) is looked at in batches: what many files include is read once. A FILE stands for its batch then.

What was clean is remembered in BUILD/tidy by a hash of the file, all our headers that it includes, its compile command, .clang-tidy
and clang-tidy's version: a second run looks only at what changed. --tests takes the *_test.cc files and tests/ too.
"""

import argparse
import concurrent.futures
import functools
import hashlib
import json
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = re.compile(rb'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@functools.lru_cache(maxsize=None)
def content(path):
    return path.read_bytes()


def closure(path, build):
    """The file and all headers of ours that it reaches."""
    seen, open_ = set(), [path]
    while open_:
        here = open_.pop()
        if here in seen:
            continue
        seen.add(here)
        for name in INCLUDE.findall(content(here)):
            name = name.decode()
            for place in (build / "include" / name, build / "generated" / name, ROOT / name, here.parent / name):
                if place.is_file():
                    open_.append(place.resolve())
                    break
    return sorted(seen)


def key(entry, build, version):
    digest = hashlib.sha256()
    for part in (version, content(ROOT / ".clang-tidy"), content(ROOT / "src/tools/.clang-tidy"), entry["command"].encode()):
        digest.update(hashlib.sha256(part).digest())
    for path in closure(pathlib.Path(entry["file"]), build):
        digest.update(hashlib.sha256(content(path)).digest())
    return digest.hexdigest()


def files_of(entry, build):
    """The .cc files of ours that this command compiles: one, or a batch."""
    path = pathlib.Path(entry["file"])
    if build not in path.parents:
        return [path] if ROOT in path.parents else []
    return [pathlib.Path(name.decode()) for name in INCLUDE.findall(content(path))] if path.name.startswith("unity_") else []


def is_test(path):
    return path.name.endswith("_test.cc") or (ROOT / "tests") in path.parents


def tidy(entry, build):
    begin = time.monotonic()
    # The build's compiler is GCC, some of whose options mean nothing to clang. A batch lies in the build: its files' folder has the list.
    command = ["clang-tidy", "--quiet", "-p", str(build), "--extra-arg=-Wno-unused-command-line-argument", entry["file"]]
    tools = ROOT / "src/tools"
    command += [f"--config-file={tools / '.clang-tidy'}"] if all(tools in path.parents for path in files_of(entry, build)) else []
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    words = done.stdout.strip()
    if done.returncode and not words:
        words = done.stderr.strip()
    return done.returncode == 0, words, time.monotonic() - begin


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tests", action="store_true")
    parser.add_argument("files", nargs="*", type=pathlib.Path)
    args = parser.parse_intermixed_args()
    build = args.build.resolve()
    wanted = {f.resolve() for f in args.files}

    entries = {}
    for entry in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        files = files_of(entry, build)
        if files and (wanted.intersection(files) if wanted else args.tests or not all(map(is_test, files))):
            entries[pathlib.Path(entry["file"])] = entry

    version = subprocess.run(["clang-tidy", "--version"], stdout=subprocess.PIPE, check=True).stdout
    clean = build / "tidy"
    clean.mkdir(exist_ok=True)
    keys = {path: key(entry, build, version) for path, entry in entries.items()}
    todo = [path for path in entries if not (clean / keys[path]).exists()]
    todo.sort(key=lambda p: -p.stat().st_size)
    bad, slowest = 0, (0.0, "")
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(tidy, entries[path], build): path for path in todo}
        for done in concurrent.futures.as_completed(running):
            path = running[done]
            fine, words, seconds = done.result()
            slowest = max(slowest, (seconds, path.relative_to(ROOT).as_posix()))
            if fine:
                (clean / keys[path]).touch()
            else:
                bad += 1
                print(f"--- {path.relative_to(ROOT)}\n{words}", flush=True)
    unit = "batches" if any(build in path.parents for path in entries) else "files"
    print(f"clang-tidy: {len(entries)} {unit}, {len(entries) - len(todo)} known as clean, {bad} with complaints"
          + (f"; slowest {slowest[1]} {slowest[0]:.1f} s" if todo else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
