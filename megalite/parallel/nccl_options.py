"""NCCL options for each process group, read from a YAML file with Megatron-LM's group names and keys.

    dp_cp: {cga_cluster_size: 2, max_ctas: 16}
    ep: {net_name: ib, is_high_priority_stream: true}

What the file does not say stays unset, and NCCL's own choice (which differs between GPUs and versions) stands: no
default is written over it. Everything wrong in the file is reported at once. The reader imports no torch.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from megalite.config.problems import Problem, UserError
from megalite.config.suggest import nearest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroupNCCL

# Megatron-LM's name of a group -> ours with the same traffic; each of ours stands here once. Megatron-LM has no groups
# for kv heads that tp ranks share, sums dense gradients across optimizer instances over `inter_ep_dp` too, and takes
# the world for the only instance where there is one.
MEGATRON_GROUPS: dict[str, tuple[str, ...]] = {
    "tp": ("tp", "kv-replicas"),
    "cp": ("cp",),
    "hcp": ("cp-levels",),
    "dp": ("dp",),
    "dp_cp": ("dp-cp",),
    "intra_dp_cp": ("dp-cp-instance",),
    "mp": ("tp-pp",),
    "tp_cp": ("tp-cp",),
    "tp_dp": ("tp-dp",),
    "tp_dp_cp": ("tp-dp-cp",),
    "pp": ("pp",),
    "embd": ("embedding",),
    "pos_embd": ("position-embedding",),
    "ep": ("ep",),
    "ep_tp": ("etp",),
    "tp_ep_mp": ("etp-ep",),
    "tp_ep_pp": ("etp-ep-pp",),
    "ep_dp": ("edp",),
    "intra_ep_dp": ("edp-instance",),
    "inter_ep_dp": ("edp-across", "dp-cp-across"),
    "intra_dist_opt_instance": ("instance", "world"),
}
RANGES = {"cga_cluster_size": (0, 8), "min_ctas": (1, 32), "max_ctas": (1, 32)}  # NCCL user guide, ncclConfig_t
NETWORKS = ("ib", "socket")  # NCCL's own two; it compares names without regard to case
MAX_BYTES = 64 * 1024  # all groups with all keys take 3 KiB

_TAG = "tag:yaml.org,2002:"
_TYPES = {"net_name": "str", "is_high_priority_stream": "bool"}  # the others are "int"; names of YAML's tags


@dataclass(frozen=True)
class NcclOptions:
    """What one group asks of NCCL; None leaves the choice to NCCL. Hashable: equal groups share a communicator."""

    cga_cluster_size: int | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    net_name: str | None = None
    is_high_priority_stream: bool | None = None

    def as_torch(self) -> "ProcessGroupNCCL.Options":
        """A new options object for `new_group`, which writes the group's name and members into it: one per group.

        Needs a torch with NCCL. NCCL's environment variables (`NCCL_MAX_CTAS`, `NCCL_NET`, ...) win over it.
        """
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options(is_high_priority_stream=bool(self.is_high_priority_stream))
        for key in (*RANGES, "net_name"):
            value = getattr(self, key)
            if value is not None:
                setattr(options.config, key, value)
        return options


KEYS = tuple(field.name for field in fields(NcclOptions))


def read_nccl_options(path: Path, setting: str = "parallel.nccl_options") -> dict[str, NcclOptions]:
    """The options of each group that the file names, by our group names; a UserError under `setting` with all faults.

    YAML is read as a tree and never expanded, so that aliases may share a group's options but cannot blow up.
    """
    reader = _Reader(path, setting)
    options: dict[str, NcclOptions] = {}
    for name, body in reader.entries(reader.tree(), "", MEGATRON_GROUPS):
        if not isinstance(body, yaml.MappingNode):
            reader.refuse(f"{_line(body)}: {name}: must be a mapping of keys", f"{name}: {{max_ctas: 16}}")
            continue
        found = reader.group(name, body)
        options.update(dict.fromkeys(MEGATRON_GROUPS[name], found))
    if reader.problems:
        raise UserError(reader.problems)
    return options


class _Reader:
    """Reads one file and collects what is wrong with it."""

    def __init__(self, path: Path, setting: str) -> None:
        self.path = path
        self.setting = setting
        self.problems: list[Problem] = []

    def refuse(self, rule: str, remedy: str, *, here: bool = False) -> None:
        self.problems.append(Problem(self.setting, str(self.path), rule, remedy, here))

    def tree(self) -> yaml.MappingNode:
        """The mapping that the file holds, as YAML's tree of nodes."""
        content = self._content()
        try:
            root = yaml.compose(content, Loader=yaml.SafeLoader)
        except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:  # the last two: "\\UFFFFFFFF"
            mark = getattr(error, "problem_mark", None)
            where = f"line {mark.line + 1}: " if mark else ""
            what = getattr(error, "problem", None) or str(error).partition("\n")[0]
            self.refuse(f"{where}not YAML: {what}", "a mapping like dp_cp: {max_ctas: 16}")
            raise UserError(self.problems) from None
        if not isinstance(root, yaml.MappingNode):
            rule = "holds no options" if root is None else "must be a mapping of groups"
            self.refuse(rule, f"a mapping like dp_cp: {{max_ctas: 16}}, or {self.setting}=null for NCCL's own choices")
            raise UserError(self.problems)
        return root

    def _content(self) -> bytes:
        remedy = f"a YAML file that every rank can read, or {self.setting}=null"
        try:
            if not self.path.is_file():
                self.refuse(
                    "is a folder or device" if self.path.exists() else "there is no such file", remedy, here=True
                )
            else:
                with self.path.open("rb") as file:
                    content = file.read(MAX_BYTES + 1)
                if len(content) <= MAX_BYTES:
                    return content
                self.refuse(f"is larger than {MAX_BYTES // 1024} KiB", "the file of NCCL options takes 3 KiB at most")
        except OSError as error:
            self.refuse(f"cannot be read: {error.strerror}", remedy, here=True)
        raise UserError(self.problems)

    def entries(self, node: yaml.MappingNode, group: str, known: Collection[str]) -> Iterator[tuple[str, yaml.Node]]:
        """The entries with a known name, each once; `group` is empty for the groups themselves."""
        seen: dict[str, str] = {}
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else _written(key)
            where = f"{_line(key)}: {group}: " if group else f"{_line(key)}: "
            if name not in known:
                meant = (None if group else _megatron_name(name)) or nearest(name, known)
                remedy = f"{meant}?" if meant else f"one of {', '.join(known)}"
                self.refuse(f"{where}unknown {'key' if group else 'group'} {_written(key)}", remedy)
            elif name in seen:
                self.refuse(f"{where}{name} is given twice, first on {seen[name]}", "keep one of the two")
            else:
                seen[name] = _line(key)
                yield name, value

    def group(self, name: str, body: yaml.MappingNode) -> NcclOptions:
        """The options of one group; a value that is refused stays unset."""
        values: dict[str, Any] = {}
        for key, node in self.entries(body, name, KEYS):
            value = _scalar(node, _TYPES.get(key, "int"))
            values[key] = value.lower() if isinstance(value, str) else value
            rule, remedy = _broken_rule(key, values[key])
            if rule:
                self.refuse(f"{_line(node)}: {name}.{key}={_written(node)} {rule}", f"{remedy}, or leave {key} out")
                values[key] = None
        least, most = values.get("min_ctas"), values.get("max_ctas")
        if least is not None and "max_ctas" not in values:  # NCCL compares it with the unset maximum, INT_MIN
            rule = f"{_line(body)}: {name}.min_ctas={least} needs max_ctas too: NCCL refuses a minimum alone"
            self.refuse(rule, f"add max_ctas, {least} to {RANGES['max_ctas'][1]}")
        elif least is not None and most is not None and least > most:
            rule = f"{_line(body)}: {name}.min_ctas={least} must not be above max_ctas={most}"
            self.refuse(rule, f"min_ctas from 1 to {most}, or max_ctas from {least} to {RANGES['max_ctas'][1]}")
        return NcclOptions(**values)


def _broken_rule(key: str, value: int | bool | str | None) -> tuple[str, str]:
    """(the rule that a value of the right type, or None for another type, breaks, or an empty text; remedy)."""
    if key == "is_high_priority_stream":
        return "must be true or false" if value is None else "", "true or false, without quotes"
    if key == "net_name":
        return "" if value in NETWORKS else "is no network that NCCL has itself", " or ".join(NETWORKS)
    low, high = RANGES[key]
    if not isinstance(value, int):
        return "must be a whole number", f"{low} to {high}"
    return "" if low <= value <= high else "is out of range", f"{low} to {high}"


def _scalar(node: yaml.Node, kind: str) -> Any:
    """The value of a scalar that YAML takes for an "int", "str" or "bool", else None."""
    if not isinstance(node, yaml.ScalarNode) or node.tag != _TAG + kind:
        return None
    try:
        return yaml.constructor.SafeConstructor().construct_object(node)
    except (ValueError, LookupError):  # `!!int many`, `!!bool perhaps`, thousands of digits
        return None


def _megatron_name(ours: str) -> str | None:
    """Megatron-LM's name for the group that we call `ours`."""
    return next((name for name, groups in MEGATRON_GROUPS.items() if ours in groups), None)


def _written(node: yaml.Node) -> str:
    """A node much as the user wrote it, short and printable."""
    if not isinstance(node, yaml.ScalarNode):
        return "{...}" if isinstance(node, yaml.MappingNode) else "[...]"
    quote = node.style if node.style in ("'", '"') else ""
    text = node.value if len(node.value) <= 40 else f"{node.value[:40]}..."
    return quote + repr(text)[1:-1] + quote


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"
