"""Writes (--write) or checks (--check) the defaults in conf/ and docs/configuration.md against the schema."""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megalite.config.document import stale_files, write_files  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="bring the files up to date")
    action.add_argument("--check", action="store_true", help="exit 1 if a file is not up to date")
    stale = stale_files(ROOT)
    if parser.parse_args().write:
        write_files(ROOT)
    for path in stale:
        print(f"{'written' if '--write' in sys.argv else 'not up to date'}: {path.relative_to(ROOT)}")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
