#!/usr/bin/python
"""Ansible module: the container image that a plan names."""

from __future__ import annotations

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import containers, spec
from ansible.module_utils.exl3_host.engine import Engine
from ansible.module_utils.exl3_host.errors import HostError

DOCUMENTATION = """
module: exl3_image
short_description: Pull the image of a plan by its digest, where it is not there yet
options:
  store: {type: path, required: true, description: "The store, which notes what was pulled."}
  state: {type: str, choices: [present, absent], default: present,
    description: "absent removes the images that were pulled, where no container needs them."}
  plan: {type: dict, default: {}, description: "The plan; nothing is done for a native one."}
  registry: {type: str, default: "",
    description: "Where images come from, in front of their name; the digest stays the same."}
  offline: {type: bool, default: false, description: "Refuse instead of using the network."}
  docker_host: {type: str, default: "", description: "Socket of the engine, unix://..."}
"""

EXAMPLES = """
- exl3_image: {plan: "{{ exl3_plan_made.plan }}", store: /var/lib/exl3}
- exl3_image: {store: /var/lib/exl3, state: absent}
"""

RETURN = """
removed: {type: list, returned: state is absent, description: "Images that are gone."}
image: {type: str, returned: state is present,
  description: "Id of the image, empty for a native plan."}
"""


def remove(notes: Path, docker_host: str, is_check: bool) -> list[str]:
    """Remove what was pulled; images that came otherwise stay. Raises HostError."""
    removed = []
    for path in sorted(notes.glob("*.json")):
        image = spec.read_json(path)
        engine = Engine(docker_host or None)
        found = containers.find_image(engine, image["name"], image["digest"])
        if found is not None:
            removed.append(f"{image['name']}@{image['digest']}")
            if not is_check:
                engine.remove_image(found["Id"])
        if not is_check:
            path.unlink()
    return removed


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "store": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "plan": {"type": "dict", "default": {}},
            "registry": {"type": "str", "default": ""},
            "offline": {"type": "bool", "default": False},
            "docker_host": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    given = module.params
    notes = Path(given["store"]) / "images"
    if given["state"] == "absent":
        try:
            removed = remove(notes, given["docker_host"], module.check_mode)
        except HostError as error:
            module.fail_json(msg=str(error))
        module.exit_json(changed=bool(removed), removed=removed)
    box = given["plan"].get("container")
    if not box:
        module.exit_json(changed=False, image="")
    image = box["image"]
    try:
        engine = Engine(given["docker_host"] or None)
        if containers.find_image(engine, image["name"], image["digest"]) is None:
            if not module.check_mode:
                containers.fetch(engine, image, given["registry"], given["offline"])
                digest = image["digest"].removeprefix("sha256:")[:16]
                spec.write_json(notes / f"{digest}.json", image)
            module.exit_json(
                changed=True, image=image["digest"], msg=f"pulled {image['name']}@{image['digest']}"
            )
        found = containers.require_image(engine, image)
    except HostError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, image=found["Id"])


if __name__ == "__main__":
    main()
