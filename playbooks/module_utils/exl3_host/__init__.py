"""Host logic: what a machine is, what a recipe asks for, and the plan that joins the two.

This package never imports `exl3_plugin`; the two meet in files and command lines. Modules that an
Ansible module may carry to a host (`errors`, `cpus`, `facts`, `fit`, `redact`) use the standard
library alone; `schema`, `recipe` and `cli` need pydantic, ruamel.yaml, typer and rich.
"""
