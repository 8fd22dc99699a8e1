"""`python -m exl3_plugin.quantize`."""

from exl3_plugin.quantize.cli import main

main()
