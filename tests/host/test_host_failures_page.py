"""docs/known-failures.md names a test in each row; every one of them is there."""

import ast
import re
from pathlib import Path


def rows(checkout: Path) -> list[list[str]]:
    text = (checkout / "docs" / "known-failures.md").read_text()
    found = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in text.splitlines()]
    return [row for row in found if len(row) == 3 and row[0] not in ("report", "---")]


def test_each_row_names_tests_that_are_there(checkout: Path) -> None:
    found = rows(checkout)
    assert len(found) > 50
    defined: dict[str, set[str]] = {}
    for report, _, shown in found:
        named = re.findall(r"`(\w+/test_\w+)::(\w+)`", shown)
        assert named and len(named) == shown.count("`") // 2, f"{report}: {shown}"
        for module, test in named:
            path = checkout / "tests" / f"{module}.py"
            if module not in defined:
                tree = ast.parse(path.read_text())
                defined[module] = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
            assert f"test_{test}" in defined[module], f"{report}: {module}::{test}"
