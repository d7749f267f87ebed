"""The completion scripts know every verb and option, and complete in the shells that are here."""

import pathlib
import re
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cli  # noqa: E402


def verbs():
    return re.findall(r"^  (\w+) ", cli.fine("--help").split("Subcommands:")[1].split("Examples:")[0], re.MULTILINE)


def options(verb):
    return sorted(set(re.findall(r"--[\w-]+", cli.fine(verb, "--help").split("Options:")[1].split("Examples:")[0])))


def bash(line):
    script = cli.fine("completion", "bash") + f'COMP_LINE="{line}"; COMP_POINT=${{#COMP_LINE}}; _kvloom 2>/dev/null; printf "%s\\n" "${{COMPREPLY[@]}}"'
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()


def fish(line):
    script = cli.fine("completion", "fish") + f"\ncomplete -C '{line}'"
    done = subprocess.run(["fish", "--no-config", "-c", script], capture_output=True, text=True, check=True)
    return [entry.split("\t")[0] for entry in done.stdout.splitlines()]


class Completion(unittest.TestCase):
    def test_every_option_of_every_verb_is_known_to_every_shell(self):
        for shell in ("bash", "zsh", "fish"):
            script = cli.fine("completion", shell)
            for verb in verbs():
                for option in options(verb):
                    with self.subTest(shell=shell, verb=verb, option=option):
                        self.assertIn(f"-l {option[2:]}" if shell == "fish" else option, script)

    def test_bash_completes(self):
        self.assertEqual(bash("kvloom pl"), ["plan"])
        self.assertIn("completion", bash("kvloom "))
        self.assertIn("--version", bash("kvloom --"))
        self.assertIn("--prefill", bash("kvloom plan --pre"))
        self.assertIn("--tables", bash("kvloom plan --explain --t"))
        self.assertEqual(bash("kvloom plan --kv-dtype fp8-"), ["fp8-dsa"])
        self.assertEqual(bash("kvloom completion f"), ["fish"])
        self.assertEqual(bash("kvloom plan --tokens "), [])
        # = and : end a word in bash: only what comes after is given back.
        self.assertEqual(bash("kvloom plan --prefill cp=8:l"), ["layers"])
        self.assertEqual(bash("kvloom plan --decode tp=8,dr"), ["8,draft:replicated"])

    def test_bash_completes_files(self):
        self.assertIn(str(cli.SOURCE / "samples"), bash(f"kvloom plan --model {cli.SOURCE}/sampl"))

    def test_fish_completes(self):
        self.assertEqual(fish("kvloom pl"), ["plan"])
        self.assertIn("--prefill", fish("kvloom plan --pre"))
        self.assertIn("cp=8:layers", fish("kvloom plan --prefill cp=8"))
        self.assertIn("tp=8,dcp=4", fish("kvloom plan --decode tp=8,dc"))
        self.assertEqual(sorted(fish("kvloom completion ")), ["bash", "fish", "zsh"])

    def test_zsh_reads_its_script(self):
        subprocess.run(["zsh", "-n"], input=cli.fine("completion", "zsh"), text=True, check=True)


if __name__ == "__main__":
    unittest.main()
