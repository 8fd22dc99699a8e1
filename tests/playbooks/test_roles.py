"""What holds for every role and module: names, defaults, specifications, documentation."""

import ast
import re
import sys
from pathlib import Path

import pytest
import tomllib
import yaml
from exl3_host import preflight

PLAYBOOKS = Path(__file__).resolve().parents[2] / "playbooks"
ROLES = sorted(path.name for path in (PLAYBOOKS / "roles").iterdir())
HOW_MANY_AT_ONCE = {"serial", "max_fail_percentage", "any_errors_fatal"}
MODULES = sorted(path.stem for path in (PLAYBOOKS / "library").glob("*.py"))


def load(role: str, part: str) -> dict:
    return yaml.safe_load((PLAYBOOKS / "roles" / role / part).read_text()) or {}


@pytest.mark.parametrize("role", ROLES)
def test_defaults_and_specification_agree(role):
    defaults = load(role, "defaults/main.yml")
    options = load(role, "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    assert {name: option["default"] for name, option in options.items()} == defaults
    assert all(option["description"] for option in options.values())


@pytest.mark.parametrize("role", ROLES)
def test_variables_have_the_prefix_of_their_role(role):
    names = set(load(role, "defaults/main.yml"))
    for task in load(role, "tasks/main.yml"):
        names |= {task["register"]} if "register" in task else set()
        names |= {task["loop_control"]["loop_var"]} if "loop_control" in task else set()
    assert [name for name in names if not name.startswith(f"{role}_")] == []


@pytest.mark.parametrize("play", sorted(PLAYBOOKS.glob("*.yml")), ids=lambda path: path.name)
def test_playbooks_hold_roles_and_nothing_else(play):
    for one in yaml.safe_load(play.read_text()):
        assert set(one) <= {"name", "hosts", "gather_facts", "roles", *HOW_MANY_AT_ONCE}


@pytest.mark.parametrize("module", MODULES)
def test_modules_document_exactly_their_options(module):
    path = PLAYBOOKS / "library" / f"{module}.py"
    tree = ast.parse(path.read_text())
    texts = {
        node.targets[0].id: yaml.safe_load(node.value.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and node.targets[0].id in ("DOCUMENTATION", "EXAMPLES", "RETURN")
    }
    documented = texts["DOCUMENTATION"]
    assert documented["module"] == module and texts["EXAMPLES"] and texts["RETURN"]
    call = next(
        keyword.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "AnsibleModule"
        for keyword in node.keywords
        if keyword.arg == "argument_spec"
    )
    options = {key.value for key in call.keys if key is not None}
    for key, value in zip(call.keys, call.values):
        if key is None:
            assert ast.unparse(value) == "preflight.INSTANCE_OPTIONS"
            options |= set(preflight.INSTANCE_OPTIONS)
    assert options == set(documented["options"])


def test_what_runs_on_a_host_needs_the_standard_library_alone():
    """Ansible carries these files to hosts that have a bare Python."""
    carried = ["venv", "store", "service", "spec", "status", "wait", "hints", "supervisor"]
    carried += ["systemd", "procs", "preflight", "repairs", "errors", "engine", "engine_host"]
    carried += ["containers", "runner", "rehearsal", "releases", "refusals", "seccomp", "gpu_use"]
    carried += ["fetch", "manifest", "lock", "learned", "kv", "headers", "bundle", "fit"]
    carried += ["commands", "keys", "links", "metrics", "nccl", "nodes", "peers", "rank_guard"]
    carried += ["facts", "commands", "nvml", "pci", "gpus", "topo_matrix", "numa", "choice"]
    carried += ["gpupin", "measure", "proof", "checks", "topology"]
    for name in carried:
        tree = ast.parse((PLAYBOOKS / "module_utils" / "exl3_host" / f"{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                roots = [node.module.split(".")[0]]
            elif isinstance(node, ast.Import):
                roots = [alias.name.split(".")[0] for alias in node.names]
            else:
                continue
            for root in roots:
                assert root in sys.stdlib_module_names, f"{name}.py imports {root}"


def test_supervisor_stands_alone():
    """It is copied beside the service that it runs, and started by path."""
    text = (PLAYBOOKS / "module_utils" / "exl3_host" / "supervisor.py").read_text()
    assert not re.search(r"^from \.", text, re.M)


def test_no_task_uses_a_shell():
    words = ("shell", "command", "raw", "script")
    for path in PLAYBOOKS.rglob("tasks/*.yml"):
        for task in yaml.safe_load(path.read_text()):
            used = {key.removeprefix("ansible.builtin.") for key in task}
            assert used.isdisjoint(words), f"{path}: {task['name']}"


def test_no_task_hides_what_went_wrong():
    """kubespray#10270: an error that is censored whole helps nobody. Secrets are files here."""
    for path in PLAYBOOKS.rglob("tasks/*.yml"):
        for task in yaml.safe_load(path.read_text()):
            assert "no_log" not in task and "ignore_errors" not in task, f"{path}: {task['name']}"


def test_the_planners_packages_are_named_alike_everywhere(checkout):
    """requirements/controller.txt lets recipes be checked before our wheel is installed."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["dependencies"]
    listed = (checkout / "requirements" / "controller.txt").read_text().splitlines()
    for name in ("pydantic", "rich", "ruamel.yaml", "typer"):
        (there,) = [line for line in project if line.startswith(name)]
        assert there in listed


def test_every_variable_is_documented(checkout):
    text = "\n".join(path.read_text() for path in (checkout / "docs").glob("*.md"))
    for role in ROLES:
        options = load(role, "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
        for name, option in options.items():
            assert f"`{name}`" in text, name
            for inner in option.get("options", {}):
                assert f"`{inner}`" in text, f"{name}.{inner}"
