"""The image's bill of materials and licence report, from what is installed.

  python -I -m exl3_image.inventory PYTHON_SBOM.json --out DIR

adds Debian's packages to the CycloneDX list that cyclonedx-py made of the venv, and writes
sbom.json and licences.txt. A licence is what the package itself declares; "not declared" is said as that.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from importlib import metadata
from pathlib import Path

_FIELDS = "${Package}\t${Version}\t${Architecture}\n"
_LICENCE = re.compile(r"^License:\s*(\S.*)$", re.MULTILINE)


def debian_packages() -> list[dict]:
    """Name, version, architecture and licences of every Debian package."""
    done = subprocess.run(
        ["dpkg-query", "--show", f"--showformat={_FIELDS}"],
        capture_output=True,
        text=True,
        check=True,
    )
    out = []
    for line in done.stdout.splitlines():
        name, version, architecture = line.split("\t")
        text = Path(f"/usr/share/doc/{name}/copyright")
        found = _LICENCE.findall(text.read_text(errors="replace")) if text.is_file() else []
        out.append(
            {
                "name": name,
                "version": version,
                "architecture": architecture,
                "licences": sorted(set(found)),
            }
        )
    return out


def as_component(package: dict) -> dict:
    """One Debian package as CycloneDX writes it."""
    where = f"pkg:deb/debian/{package['name']}@{package['version']}?arch={package['architecture']}"
    component = {
        "type": "library",
        "bom-ref": where,
        "name": package["name"],
        "version": package["version"],
        "purl": where,
    }
    if package["licences"]:
        component["licenses"] = [{"license": {"name": name}} for name in package["licences"]]
    return component


def python_licence(item: metadata.Distribution) -> str:
    """What a distribution declares: the expression, else classifiers, else its licence field."""
    fields = item.metadata
    if expression := fields.get("License-Expression"):
        return expression
    classifiers = [
        text.rpartition(" :: ")[2]
        for text in fields.get_all("Classifier") or []
        if text.startswith("License :: ") and text != "License :: OSI Approved"
    ]
    if classifiers:
        return ", ".join(sorted(classifiers))
    text = (fields.get("License") or "").strip()
    return text.splitlines()[0][:60] if text else "not declared"


def main() -> None:
    """Command line of the build."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python_sbom", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    sbom = json.loads(options.python_sbom.read_text())
    packages = debian_packages()
    sbom.setdefault("components", []).extend(as_component(package) for package in packages)
    (options.out / "sbom.json").write_text(json.dumps(sbom, indent=1, sort_keys=True) + "\n")
    rows = {
        (item.metadata["Name"].lower(), item.version, python_licence(item))
        for item in metadata.distributions()
    }
    rows |= {
        (
            f"deb:{package['name']}",
            package["version"],
            ", ".join(package["licences"]) or "see copyright",
        )
        for package in packages
    }
    lines = [f"{name}\t{version}\t{licence}" for name, version, licence in sorted(rows)]
    (options.out / "licences.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
