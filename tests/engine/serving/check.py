"""A stand-in for the numeric check, which needs a GPU. STANDIN_NUMERIC=wrong fails it."""

import json
import os
import sys

wrong = os.environ.get("STANDIN_NUMERIC") == "wrong"
cases = [{"case": "decode 16 heads bf16", "ok": not wrong}]
print(json.dumps({"schema": 1, "cases": cases, "flashkda": []}))
sys.exit(3 if wrong else 0)
