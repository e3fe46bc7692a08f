"""Whether a key for wandb is set up on this machine. The key itself is looked at and forgotten."""

import configparser
import netrc
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

HOSTS = ("api.forge.coreweave.com", "api.wandb.ai")  # under which `wandb login` keeps a key unless told of a server


def key_is_set_up(variables: Mapping[str, str], home: Path | None = None) -> bool:
    """Looks where wandb looks: the environment, its settings file, the netrc file in `home` (default: the user's).
    What cannot be read, or is nowhere, holds none."""
    if variables.get("WANDB_API_KEY") or variables.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        return _in_files(variables, home or Path.home())
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return False


def _in_files(variables: Mapping[str, str], home: Path) -> bool:
    settings = _settings(variables, home)
    if settings.get("api_key"):
        return True
    server = variables.get("WANDB_BASE_URL") or settings.get("base_url")
    return _in_netrc(variables, home, [urlsplit(server).netloc] if server else HOSTS)


def _settings(variables: Mapping[str, str], home: Path) -> Mapping[str, str]:
    folder = Path(variables.get("WANDB_CONFIG_DIR") or home / ".config" / "wandb").expanduser()
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(folder / "settings", encoding="utf-8")
    except (configparser.Error, OSError, UnicodeDecodeError):
        return {}
    return dict(parser["default"]) if parser.has_section("default") else {}


def _in_netrc(variables: Mapping[str, str], home: Path, hosts: list[str] | tuple[str, ...]) -> bool:
    named = variables.get("NETRC")
    paths = [Path(named).expanduser()] if named else [home / ".netrc", home / "_netrc"]
    path = next((path for path in paths if path.exists()), paths[0])
    try:
        machines = netrc.netrc(path).hosts
    except (netrc.NetrcParseError, OSError, UnicodeDecodeError):
        return False
    return any(host in machines and machines[host][2] for host in hosts)
