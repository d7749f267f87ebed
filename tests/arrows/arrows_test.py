"""Every rule of arrows.py can fail, and holds its tongue where it should: made-up files, one per rule and exception."""

import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import arrows  # noqa: E402


def rules_broken(place, text):
    with tempfile.TemporaryDirectory() as src:
        path = pathlib.Path(src) / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        found, files = arrows.broken_in_tree(src)
    assert files == 1
    return sorted({rule for _, _, rule, _ in found})


class Arrows(unittest.TestCase):
    def test_every_pair_of_folders_follows_the_table(self):
        for folder, allowed in arrows.ARROWS.items():
            for target in arrows.ARROWS:
                for ending in ("x.h", "x.cc", "deep/er/x.cc"):
                    with self.subTest(folder=folder, target=target, ending=ending):
                        expected = [] if target == folder or target in allowed else ["tools" if target == "tools" else "arrow"]
                        self.assertEqual(rules_broken(f"{folder}/{ending}", f'#include "kvloom/{target}/y.h"\n'), expected)

    def test_the_table_is_the_designs(self):
        may = arrows.ARROWS
        for folder, target in [("base", "geometry"), ("geometry", "plan"), ("plan", "bind"), ("bind", "session"), ("transport", "geometry"),
                               ("transport", "session"), ("landing", "plan"), ("landing", "transport"), ("bind", "transport"),
                               ("session", "tools"), ("collective", "geometry")]:
            self.assertNotIn(target, may[folder])
        self.assertEqual(may["session"], {"base", "geometry", "plan", "bind", "transport", "landing"})

    def test_folders_and_files_out_of_the_table_are_refused(self):
        self.assertEqual(rules_broken("misc/x.h", ""), ["arrow"])
        self.assertEqual(rules_broken("x.h", ""), ["arrow"])
        self.assertEqual(rules_broken("base/x.h", '#include "kvloom/misc/x.h"\n'), ["arrow"])

    def test_own_headers_have_one_form(self):
        self.assertEqual(rules_broken("base/x.cc", '#include "x.h"\n'), ["form"])
        self.assertEqual(rules_broken("base/x.cc", '#include "../base/x.h"\n'), ["form"])
        self.assertEqual(rules_broken("base/x.cc", "#include <kvloom/base/x.h>\n"), ["form"])
        self.assertEqual(rules_broken("base/x.cc", '  #  include "kvloom/base/x.h"\n'), [])

    def test_pure_folders_have_no_io_threads_clock_or_cuda(self):
        for header in ["thread", "mutex", "atomic", "condition_variable", "chrono", "ctime", "fstream", "iostream", "filesystem", "cstdio",
                       "unistd.h", "fcntl.h", "sys/mman.h", "sys/socket.h", "pthread.h", "cuda.h", "cuda_runtime.h", "cuda/std/span",
                       "nvml.h", "fmt/os.h", "fmt/chrono.h"]:
            for folder in sorted(arrows.PURE):
                with self.subTest(header=header, folder=folder):
                    self.assertEqual(rules_broken(f"{folder}/x.cc", f"#include <{header}>\n"), ["pure"])
            self.assertEqual(rules_broken("transport/shm/x.cc", f"#include <{header}>\n"), [])
        self.assertEqual(rules_broken("plan/x.cc", '#include "kvloom/base/clock.h"\n'), ["pure"])
        self.assertEqual(rules_broken("geometry/x.h", "#include <sstream>\n#include <vector>\n#include <fmt/format.h>\n"), [])

    def test_installed_headers_need_nothing_private(self):
        for header in ["nlohmann/json.hpp", "flatbuffers/flatbuffers.h", "xxhash.h", "CLI/CLI.hpp", "gtest/gtest.h"]:
            with self.subTest(header=header):
                self.assertEqual(rules_broken("geometry/x.h", f"#include <{header}>\n"), ["private"])
                self.assertEqual(rules_broken("geometry/x.cc", f"#include <{header}>\n"), [])
                self.assertEqual(rules_broken("tools/x.h", f"#include <{header}>\n"), [])
        self.assertEqual(rules_broken("plan/x.h", '#include "kvloom/plan/wire_generated.h"\n'), ["private"])

    def test_feature_tests_stay_in_one_transports_folder(self):
        for line in ["#if KVLOOM_CUDA", "#ifdef __AVX512F__", "#ifndef X", "#  if defined(__linux__)"]:
            with self.subTest(line=line):
                self.assertEqual(rules_broken("base/x.h", f"{line}\n#endif\n"), ["feature"])
                self.assertEqual(rules_broken("transport/transport.cc", f"{line}\n#endif\n"), ["feature"])
                for place in ("transport/shm/x.cc", "base/x_test.cc"):
                    self.assertEqual(rules_broken(place, f"{line}\n#endif\n"), [])
        self.assertEqual(rules_broken("base/x.h", "#ifndef NDEBUG\n#endif\n"), [])

    def test_the_environment_is_read_in_tools_only(self):
        self.assertEqual(rules_broken("transport/shm/x.cc", 'auto* p = std::getenv("X");\n'), ["environment"])
        self.assertEqual(rules_broken("tools/x.cc", 'auto* p = std::getenv("X");\n'), [])

    def test_test_files_see_all_but_tools(self):
        self.assertEqual(rules_broken("base/x_test.cc", '#include <fstream>\n#include "kvloom/bind/y.h"\n#include "tests/c/suite.h"\n'), [])
        self.assertEqual(rules_broken("base/x_test.cc", '#include "kvloom/tools/y.h"\n'), ["tools"])
        self.assertEqual(rules_broken("base/x.cc", '#include "tests/c/suite.h"\n'), ["form"])

    def test_comments_are_not_code(self):
        self.assertEqual(rules_broken("base/x.h", '// #include "x.h"\n/*\n#include "y.h"\n#if 0\n*/\n'), [])
        self.assertEqual(rules_broken("base/x.h", 'auto u = "http://x/*";\n#include "x.h"\n// */\n'), ["form"])

    def test_an_empty_tree_is_not_a_pass(self):
        with tempfile.TemporaryDirectory() as src:
            sys.argv = ["arrows.py", src]
            self.assertEqual(arrows.main(), 1)


if __name__ == "__main__":
    unittest.main()
