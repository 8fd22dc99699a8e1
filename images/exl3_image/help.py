"""vLLM's own help, also where there is no GPU: vLLM 0.33 asks for a device to make its defaults.

python -I -m exl3_image.help serve --help
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run vLLM's command line with a device type filled in where none was found."""
    from vllm.platforms import current_platform

    if not current_platform.device_type:
        current_platform.device_type = "cuda"
    from vllm.entrypoints.cli.main import main as vllm

    sys.argv[0] = "vllm"
    vllm()


if __name__ == "__main__":
    main()
