#!/usr/bin/python
"""Ansible module: the container image that a plan names."""

from __future__ import annotations

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.exl3_host import containers
from ansible.module_utils.exl3_host.engine import Engine
from ansible.module_utils.exl3_host.errors import HostError

DOCUMENTATION = """
module: exl3_image
short_description: Pull the image of a plan by its digest, where it is not there yet
options:
  plan: {type: dict, default: {}, description: "The plan; nothing is done for a native one."}
  registry: {type: str, default: "",
    description: "Where images come from, in front of their name; the digest stays the same."}
  offline: {type: bool, default: false, description: "Refuse instead of using the network."}
  docker_host: {type: str, default: "", description: "Socket of the engine, unix://..."}
"""

EXAMPLES = """
- exl3_image: {plan: "{{ exl3_plan_made.plan }}", registry: registry.example.org/mirror}
"""

RETURN = """
image: {type: str, returned: always, description: "Id of the image, empty for a native plan."}
"""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "plan": {"type": "dict", "default": {}},
            "registry": {"type": "str", "default": ""},
            "offline": {"type": "bool", "default": False},
            "docker_host": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    given = module.params
    box = given["plan"].get("container")
    if not box:
        module.exit_json(changed=False, image="")
    image = box["image"]
    try:
        engine = Engine(given["docker_host"] or None)
        if containers.find_image(engine, image["name"], image["digest"]) is None:
            if not module.check_mode:
                containers.fetch(engine, image, given["registry"], given["offline"])
            module.exit_json(
                changed=True, image=image["digest"], msg=f"pulled {image['name']}@{image['digest']}"
            )
        found = containers.require_image(engine, image)
    except HostError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, image=found["Id"])


if __name__ == "__main__":
    main()
