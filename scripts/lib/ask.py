"""Ask the server of a plan one question: `ask.py PLAN.json [QUESTION]`. Prints endpoint, question
and answer.
"""

import json
import sys
from pathlib import Path

from exl3_host import spec, wait


def main(arguments: list[str]) -> int:
    """Command line; 1 when the server does not answer."""
    path, *asked = arguments
    plan = json.loads(Path(path).read_text())
    question = asked[0] if asked else plan["health"]["smoke"]["prompt"]
    endpoint = spec.endpoint_of(spec.make_spec(plan, Path("/"), "supervisor"))
    try:
        answer = wait.complete(endpoint, question, max_tokens=48, timeout_s=120)
    except (RuntimeError, OSError) as error:
        print(f"error: {endpoint.url} does not answer: {error}", file=sys.stderr)
        return 1
    print(f"endpoint  {endpoint.url}/v1  (model {endpoint.served_name})")
    print(f"question  {question}")
    print(f"answer    {answer.strip()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
