"""Every setting of megalite: name, type, default, meaning and the bounds that concern it alone.

`conf/` and `docs/configuration.md` are written from these dataclasses. A default of None means "derived": the meaning
says from what, and a field's type is the one that it has once `derive.py` or the start has filled it in.
"""

from dataclasses import dataclass, field
from typing import Any

from megalite.config.activations import ACTIVATIONS
from megalite.config.schedule_request import SCHEDULE_NAMES

A_YEAR_S = 365 * 24 * 3600  # as long as a wait may be asked for
LEAST_FLEX_HEAD = 16  # numbers of a head: torch's flex attention takes no smaller ones
HELD_OUT = "held_out"  # the validation set that data.validation_fraction makes
MOST_STEPS = 10**8 - 1  # names of checkpoints have eight digits
MOST_LAYERS, MOST = 10_000, 2**20  # far beyond what anyone trains, and few enough to list


def setting(default: Any, meaning: str, *, choices: str = "", name: str | None = None, **limits: float) -> Any:
    """A dataclass field with its meaning, and the choices (`a|b`) and limits (at_least, above, at_most, below) that
    rule.py enforces and the docs print. `name`: what users call it, where Python does not allow it for a field."""
    metadata = {"name": name, "meaning": meaning, "choices": tuple(filter(None, choices.split("|"))), "limits": limits}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class MoEConfig:
    """Experts in place of the MLP of some layers; docs/moe.md has the formulas."""

    num_experts: int = setting(0, "experts of a layer; 0: a dense model", at_least=0, at_most=MOST)
    top_k: int = setting(2, "experts that each token goes through", at_least=1)
    ffn_hidden_size: int = setting(None, "inner width of one expert; null: as model.ffn_hidden_size", at_least=1)
    num_shared_experts: int = setting(0, "experts that every token goes through besides, as one MLP", at_least=0)
    first_dense_layers: int = setting(0, "layers at the start that have an MLP and no experts", at_least=0)
    layer_freq: int = setting(1, "every n-th layer has experts, from the first after these on", at_least=1)
    score: str = setting("softmax", "what the router makes of its logits", choices="softmax|sigmoid")
    pre_softmax: bool = setting(False, "softmax over all experts before the choice; false: over the chosen ones")
    normalize_weights: bool = setting(True, "the weights of a token's experts are divided by their sum")
    scaling_factor: float = setting(1.0, "multiplies the weights", above=0)
    num_groups: int = setting(1, "groups of experts, of which a token chooses first", at_least=1)
    top_k_groups: int = setting(1, "groups that a token may choose experts from", at_least=1)
    aux_loss: str = setting("microbatch", "tokens that the balancing loss counts", choices="microbatch|sequence|global")
    aux_loss_coeff: float = setting(0.01, "coefficient of the balancing loss; 0: none", at_least=0)
    z_loss_coeff: float = setting(0.0, "coefficient of the squared log-sum-exp of router logits; 0: none", at_least=0)
    expert_bias_rate: float = setting(0.0, "score=sigmoid: step of the balancing biases; 0: none", at_least=0)
    capacity_factor: float | None = setting(None, "shares of rows that an expert takes at most; null: all", above=0)
    dispatcher: str = setting("alltoall", "rows go to experts' ranks, or to all", choices="alltoall|allgather")


@dataclass
class ModelConfig:
    """Shape and mathematics of the GPT. `model=NAME` picks a published shape; every field can be overridden."""

    name: str = setting("tiny", "label of the shape, part of the default run folder's name")
    num_layers: int = setting(4, "transformer blocks", at_least=1, at_most=MOST_LAYERS)
    hidden_size: int = setting(256, "width of the residual stream", at_least=1)
    num_attention_heads: int = setting(4, "query heads", at_least=1)
    num_key_value_heads: int = setting(None, "key and value heads; null: as many as query heads", at_least=1)
    head_size: int = setting(None, "width of one head; null: hidden_size / num_attention_heads", at_least=1)
    ffn_hidden_size: int = setting(None, "width of the MLP; null: 4 * hidden_size, if gated 8/3 of it", at_least=1)
    vocab_size: int = setting(None, "tokens that the model knows; null: the tokenizer's", at_least=2)
    vocab_multiple: int = setting(128, "the embedding is padded to a multiple of this, outside the loss", at_least=1)
    max_positions: int = setting(None, "length of the learned table; null: train.seq_length", at_least=1)
    position: str = setting("rope", "how positions enter the model", choices="learned|rope")
    rope_theta: float = setting(10000.0, "base of the rotary frequencies", above=0)
    rope_scaling: str = setting("llama3", "how longer contexts are scaled", choices="linear|llama3|yarn")
    rope_scaling_factor: float = setting(1.0, "factor by which the context is longer; 1: no scaling", at_least=1)
    rope_original_positions: int = setting(None, "llama3, yarn: context length before scaling", at_least=1)
    rope_low_frequency_factor: float = setting(1.0, "llama3: below this many turns, fully scaled", above=0)
    rope_high_frequency_factor: float = setting(4.0, "llama3: above this many turns, unscaled", above=0)
    rope_beta_slow: float = setting(1.0, "yarn: below this many turns, fully scaled", above=0)
    rope_beta_fast: float = setting(32.0, "yarn: above this many turns, unscaled", above=0)
    rope_truncate: bool = setting(True, "yarn: these two borders are moved apart to whole pairs of dimensions")
    rope_attention_factor: float | None = setting(None, "yarn: of queries and keys; null: by the mscales", above=0)
    rope_mscale: float | None = setting(None, "yarn: the factor is m(this) / m(rope_mscale_all_dim)", above=0)
    rope_mscale_all_dim: float | None = setting(None, "yarn: m(x) = 0.1 x log(scale) + 1; nulls: m(1)", above=0)
    norm: str = setting("rmsnorm", "normalisation before attention, MLP and head", choices="layernorm|rmsnorm")
    norm_eps: float = setting(1e-5, "added to the variance in every norm", above=0)
    activation: str = setting(
        "swiglu", ", ".join(each.meaning for each in ACTIVATIONS.values()), choices="|".join(ACTIVATIONS)
    )
    bias: bool = setting(False, "biases in linear layers and layer norms; experts and routers have none")
    qk_norm: bool = setting(False, "RMSNorm over each head of queries and keys (Qwen3)")
    tie_embeddings: bool = setting(True, "the head uses the word embedding's weight")
    dropout: float = setting(0.0, "dropout on the output of attention and MLP", at_least=0, below=1)
    attention_dropout: float = setting(None, "dropout of attention probabilities; null: dropout", at_least=0, below=1)
    embedding_dropout: float = setting(None, "dropout on the embeddings; null: as dropout", at_least=0, below=1)
    mup_base_width: int | None = setting(
        None, "hidden_size that rates are tuned at, docs/mup.md; null: any", at_least=1
    )
    mup_base_layers: int | None = setting(None, "num_layers that rates are tuned at; null: any", at_least=1)
    init_std: float = setting(0.02, "spread of start values; residual projections: over sqrt(2 * num_layers)", above=0)
    loss_chunk_tokens: int | None = setting(None, "tokens per chunk of the head and loss; null: by device", at_least=1)

    moe: MoEConfig = field(default_factory=MoEConfig)

    def has_experts(self, layer: int) -> bool:
        """Whether the layer has experts."""
        after = layer - self.moe.first_dense_layers
        return self.moe.num_experts > 0 and after >= 0 and after % self.moe.layer_freq == 0

    @property
    def expert_layers(self) -> list[int]:
        """The layers that have experts."""
        return [layer for layer in range(self.num_layers) if self.has_experts(layer)]

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate, a third matrix."""
        return ACTIVATIONS[self.activation].gated


@dataclass
class ParallelConfig:
    """How one model is laid out over the ranks; the data-parallel size is what remains of the world."""

    tp: int = setting(1, "tensor-parallel size: one layer across ranks", at_least=1, at_most=MOST)
    cp: int = setting(1, "context-parallel size: one sequence across ranks", at_least=1, at_most=MOST)
    pp: int = setting(1, "pipeline-parallel size: layers across ranks", at_least=1, at_most=MOST)
    vpp: int = setting(1, "chunks of layers (virtual stages) per pipeline rank", at_least=1, at_most=MOST)
    schedule: str = setting(None, "null: interleaved if vpp > 1, else 1f1b", choices="|".join(SCHEDULE_NAMES))
    microbatch_group_size: int | None = setting(None, "interleaved: microbatches of a turn; null: as suits", at_least=1)
    first_stage_layers: int | None = setting(None, "layers of the first pipeline rank; null: as others", at_least=0)
    last_stage_layers: int | None = setting(None, "layers of the last pipeline rank; null: as others", at_least=0)
    count_embedding: bool = setting(False, "the embedding takes the place of one layer of the first stage")
    count_loss: bool = setting(False, "the head and the loss take the place of one layer of the last stage")
    standalone_embedding: bool = setting(False, "the first pipeline rank holds the embedding and no layers")
    pipeline_layout: str | None = setting(None, "stages as Megatron-LM writes them, like 'Et*3|t*3L'; null: as above")
    ep: int = setting(1, "expert-parallel size: experts across ranks", at_least=1, at_most=MOST)
    etp: int = setting(None, "tensor-parallel size of the experts; null: tp", at_least=1, at_most=MOST)
    cp_comm: str = setting("auto", "how cp exchanges keys", choices="auto|allgather|ring|alltoall|alltoall+ring")
    cp_alltoall: int | None = setting(None, "alltoall+ring: ranks that swap heads; null: most", at_least=1)
    order: str = setting("tp-cp-ep-dp-pp", "how ranks are numbered, fastest-varying axis first")
    sequence_parallel: bool = setting(None, "norms hold 1/tp of each sequence; null: if tp > 1")
    async_tp: bool = setting(None, "products of tp send while they multiply; null: false, until GPUs have run it")
    startup_timeout_s: float = setting(1200.0, "seconds until the first step is done", above=0, at_most=A_YEAR_S)
    timeout_s: float = setting(600.0, "afterwards: seconds that a rank waits for others", above=0, at_most=A_YEAR_S)
    nccl_options: str | None = setting(None, "YAML file of NCCL options by group (docs/parallelism.md)")


@dataclass
class TrainConfig:
    """Length and shape of the training loop. Batch sizes count sequences."""

    steps: int = setting(
        None,
        "optimizer steps of the whole run; null: by one of the next, else 200",
        at_least=0,
        at_most=MOST_STEPS,
    )
    tokens: int | None = setting(None, "tokens of the whole run, in place of steps", at_least=1, at_most=10**18)
    tokens_per_parameter: float | None = setting(
        None, "those tokens by the parameters that one of them meets, in place of steps", above=0, at_most=10**9
    )
    flops: float | None = setting(None, "model FLOPs of the whole run, in place of steps", above=0, at_most=1e30)
    epochs: float | None = setting(None, "passes over the training data, in place of steps", above=0, at_most=10**6)
    global_batch_size: int = setting(8, "sequences per optimizer step, over all ranks", at_least=1, at_most=MOST)
    micro_batch_size: int = setting(
        None, "sequences of one forward pass; null: on CUDA what fits, else at most 8", at_least=1
    )
    seq_length: int = setting(256, "tokens per sequence", at_least=1)
    log_interval: int = setting(1, "steps between two lines of metrics.jsonl and of the terminal", at_least=1)
    eval_interval: int = setting(100, "steps between evaluations; 0: none", at_least=0)
    eval_interval_tokens: int | None = setting(
        None, "evaluate after a step by which the run passes a multiple of so many tokens", at_least=1, at_most=10**18
    )
    eval_batches: int = setting(8, "global batches of one evaluation, always the same", at_least=1, at_most=MOST)
    label_smoothing: float = setting(0.0, "share of each label spread over the vocabulary", at_least=0, below=1)
    z_loss: float = setting(0.0, "coefficient of the squared log of the softmax's denominator in the loss", at_least=0)
    recompute: str = setting("none", "what backward computes again", choices="none|selective|full")
    recompute_layers: int | None = setting(None, "full: number of blocks, from the first on; null: all", at_least=1)
    recompute_modules: list[str] = setting(["attention"], "selective: outputs", choices="attention|norm|activation|moe")
    compile: bool = setting(None, "torch.compile of each block and of the loss; null: on for CUDA, off for CPU")
    cuda_graph: bool = setting(None, "CUDA, one process: one call starts a microbatch's kernels; null: if it pays")
    attention: str = setting("auto", "auto: cuDNN or flash, for documents flex", choices="auto|cudnn|flash|flex|fa4")
    deterministic: bool = setting(False, "CUDA: additions in one order, so that runs repeat bit for bit")
    fp8: str | None = setting(None, "precision=bf16: inner blocks multiply fp8 numbers", choices="tensorwise|rowwise")
    fp8_weight_gradients: bool = setting(False, "fp8: weight gradients multiply fp8 numbers, too")
    max_bad_steps: int = setting(10, "stop after this many steps in a row that were not applied", at_least=1)
    skip_spikes: float | None = setting(
        None, "skip a step whose loss or gradient norm is this many sigmas above the mean; null: never", above=0
    )
    spike_window: int = setting(128, "newest applied steps, for that mean and sigma", at_least=4, at_most=10_000)
    rollback_after: int | None = setting(
        None,
        "go back to a good checkpoint after this many bad steps in a row; null: never, max_bad_steps ends the run",
        at_least=1,
    )
    check_replicas_every: int = setting(100, "steps between checks that replicas are equal; 0: none", at_least=0)
    record_pipeline: int = setting(0, "steps between recordings of the pipeline's times; 0: none", at_least=0)
    sample_interval: int = setting(0, "steps between samples of text; 0: only when training is done", at_least=0)
    sample_prompts: list[str] | None = setting(None, "how the samples begin; null: one that suits the data")
    sample_tokens: int = setting(64, "tokens of text for each prompt; 0: none", at_least=0, at_most=MOST)
    skip_steps: list[int] = setting([], "steps whose data is passed over without training on it")
    batch_ramp: list[int] | None = setting(None, "[start, increment, samples]: batches grow to full size over samples")
    profile_steps: list[int] = setting([], "steps that torch's profiler records into the run's profile folder")
    max_minutes: float | None = setting(None, "minutes after which a start saves and ends; null: no limit", above=0)


# The dtypes of what each optimizer keeps of an element beside its master, for matrices and for all other parameters;
# "moment_dtype" stands for the setting.
OPTIMIZERS = {
    "adamw": (("moment_dtype", "fp32"), ("moment_dtype", "fp32")),
    "muon": (("fp32",), ("moment_dtype", "fp32")),
}


@dataclass
class MuonConfig:
    """Muon for the matrices of blocks, r rows by c columns each; AdamW updates all else (docs/optimizer.md)."""

    lr: float | None = setting(None, "peak learning rate of matrices; null: optimizer.lr", above=0)
    weight_decay: float | None = setting(None, "of matrices; null: optimizer.weight_decay", at_least=0)
    momentum: float = setting(0.95, "share of itself that momentum keeps in a step", at_least=0, below=1)
    nesterov: bool = setting(True, "the gradient enters the update once more, beside its share of the momentum")
    coefficients: str = setting("jordan", "the polynomials", choices="jordan|quintic|polar_express|deepseek_v4")
    steps: int | None = setting(None, "how many of them, the last one repeated; null: all of the table", at_least=1)
    scale: str = setting("match_adamw", "by r and c, docs/optimizer.md", choices="match_adamw|max_ratio|ratio")
    rms: float = setting(0.2, "root mean square of an update with match_adamw", above=0)
    qkv: str = setting("projection", "orthogonalised for themselves: q, k and v, or heads", choices="projection|head")
    router: bool = setting(True, "routers are matrices, too")
    dtype: str | None = setting(None, "of the products; null: fp32 with precision=fp32, else bf16", choices="fp32|bf16")


@dataclass
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019); no weight decay on norms, biases and one-dimensional parameters.

    Its state is shared out over the data-parallel ranks; gradients travel in buckets. With precision=fp64, what is fp32
    here is fp64.
    """

    name: str = setting("adamw", "the rule by which parameters are updated", choices="|".join(OPTIMIZERS))
    lr: float = setting(1e-3, "peak learning rate", above=0)
    weight_decay: float = setting(0.1, "decoupled weight decay", at_least=0)
    weight_decay_schedule: str = setting(
        "constant", "how it changes over the steps (docs/optimizer.md)", choices="constant|to_zero|with_lr"
    )
    cautious: bool = setting(False, "elements whose first moment and gradient differ in sign are not updated")
    betas: list[float] = setting([0.9, 0.95], "decay rates of the first and second moment", at_least=0, below=1)
    eps: float = setting(1e-8, "added to the root of the second moment", above=0)
    clip_grad: float = setting(1.0, "largest global gradient norm; 0: no clipping", at_least=0)
    qk_clip: float | None = setting(None, "largest attention logit; null: any (docs/optimizer.md)", above=0)
    zero: int = setting(1, "1: masters and moments are sharded (ZeRO); 0: every rank holds all", at_least=0, at_most=1)
    instances: int = setting(1, "copies of the sharded state, each over some dp ranks (hybrid sharding)", at_least=1)
    bucket_size: int | None = setting(None, "elements of a gradient bucket; null: by model and ranks", at_least=1)
    overlap: bool = setting(True, "gradients travel during the backward pass, parameters during the next forward")
    ownership: str | None = setting(None, "cuts of state; null: even, with muon at matrices", choices="even|whole")
    gradient_dtype: str = setting("fp32", "type of gradient sums; bf16: with precision=bf16", choices="fp32|bf16")
    communication_dtype: str = setting(None, "type of gradients sent; null: gradient_dtype", choices="fp32|bf16")
    may_change: bool = setting(False, "a run may go on with another optimizer, whose state begins anew")
    moment_dtype: str = setting("fp32", "type of the first moment; the second is fp32", choices="fp32|bf16")
    ema_half_life_steps: float | None = setting(
        None, "half-life of an average of the weights, kept beside them; null: none", above=0, at_most=10**6
    )
    initial_loss_scale: float = setting(65536.0, "fp16: multiplies the loss at first", above=0, at_most=2.0**32)
    min_loss_scale: float = setting(1.0, "fp16: the scale never falls below this", above=0, at_most=2.0**32)
    loss_scale_window: int = setting(1000, "fp16: steps without an overflow after which the scale doubles", at_least=1)
    hysteresis: int = setting(2, "fp16: overflows since the scale last doubled that halve it", at_least=1)
    groups: list[dict[str, Any]] = setting([], "{match: pattern of names, lr: PEAK or 0.1x, weight_decay: NUMBER} each")

    muon: MuonConfig = field(default_factory=MuonConfig)


@dataclass
class LearningRateConfig:
    """Learning rate over the steps: a linear warm-up to optimizer.lr, then the schedule."""

    schedule: str = setting("cosine", "shape after the warm-up", choices="constant|linear|cosine|wsd|table")
    warmup_steps: int = setting(None, "steps of linear warm-up; null: min(100, train.steps / 10)", at_least=0)
    min_lr: float = setting(None, "learning rate at the last step; null: a tenth of optimizer.lr", at_least=0)
    decay_steps: int = setting(None, "wsd: steps of the final decay; null: a fifth of train.steps", at_least=0)
    table: list[list[float]] = setting([], "table: [share of the steps, factor of optimizer.lr] each, warm-up included")
    steps: int = setting(None, "steps from the first to the last of the schedule; null: train.steps", at_least=1)
    warmup_tokens: int | None = setting(None, "tokens of the warm-up, in place of steps", at_least=0, at_most=10**18)
    decay_tokens: int | None = setting(None, "wsd: tokens of that decay, in place of steps", at_least=0, at_most=10**18)


@dataclass
class DataConfig:
    """Where text comes from and how it becomes samples."""

    source: str = setting("stdlib", "set by data=NAME", choices="stdlib|text|hf|tokens")
    path: Any = setting(None, "text: file, folder, glob; hf: name; tokens: file without .bin; a list is a blend")
    weights: list[float] | None = setting(None, "shares of a blend's parts; null: by their tokens", above=0)
    subset: str | None = setting(None, "hf: configuration of the dataset")
    split: str = setting("train", "hf: split of the dataset")
    streaming: bool = setting(False, "hf: read over the network while tokenizing, without a local copy of the text")
    text_column: str = setting("text", "jsonl, json, csv, parquet, hf: the column that holds the text")
    validation_fraction: float = setting(0.1, "share of the tokens held out, from the end", at_least=0, below=1)
    validation: dict[str, Any] | None = setting(None, "other validation sets: {name: path or list of paths, ...}")
    bpe_vocab_size: int = setting(4096, "tokenizer=bpe: size of the trained vocabulary", at_least=258)
    cross_document_attention: bool = setting(True, "false: attention and positions restart at each document")
    mask_end_of_document: bool = setting(False, "true: predicting the end of a document is not part of the loss")
    cache_dir: str = setting(None, "prepared tokens; null: $XDG_CACHE_HOME/megalite or ~/.cache/megalite")
    workers: int | None = setting(None, "processes that tokenize; null: one per core", at_least=1)


@dataclass
class CheckpointConfig:
    """When training state is written, and what a run starts from."""

    interval: int = setting(100, "steps between checkpoints; 0: only at the end or when stopped", at_least=0)
    interval_tokens: int | None = setting(
        None, "save after a step by which the run passes a multiple of so many tokens", at_least=1, at_most=10**18
    )
    keep: int = setting(2, "newest checkpoints that are kept, and the newest known to be good", at_least=1)
    asynchronous: bool = setting(None, "true: steps wait only for a copy to host memory; null: on CUDA", name="async")
    remote: str | None = setting(
        None, "where checkpoints are uploaded, like s3://bucket/runs/mine (docs/checkpoints.md)"
    )
    init_from: str | None = setting(None, "folder of a transformers model to start from (docs/huggingface.md)")
    branch_from: str | None = setting(None, "RUN_DIR@step-N: begin as a branch of that run (docs/long_runs.md)")


@dataclass
class LogConfig:
    """Where a run is shown besides its own folder."""

    wandb: str | None = setting(None, "null: online if a key is set up", choices="disabled|offline|online")
    wandb_project: str = setting("megalite", "project that the run appears in")
    wandb_entity: str | None = setting(None, "user or team that the project belongs to; null: the key's own")
    wandb_name: str | None = setting(None, "name of the run there; null: run_name")
    tensorboard: bool = setting(False, "event files for TensorBoard in the run folder's tensorboard/")
    trackio: bool = setting(False, "on this machine for trackio, or where its own variables say")
    trackio_project: str = setting("megalite", "project that the run appears in there")
    update_sizes: bool = setting(False, "sizes of updates and weights by layer and group in each line of metrics.jsonl")
    layer_norms_interval: int = setting(0, "steps between RMS of outputs and gradients by layer; 0: never", at_least=0)
    alert_command: str | None = setting(None, "shell command that hears what should wake somebody (docs/logging.md)")
    alert_minutes: float = setting(10.0, "least minutes between two alerts of one kind", at_least=0)
    metrics_port: int | None = setting(
        None, "port of localhost where Prometheus reads the newest numbers; 0: a free one", at_least=0, at_most=65535
    )
    report_interval_s: float = setting(30.0, "least seconds between two report.html; 0: only at the end", at_least=0)


@dataclass
class LaunchConfig:
    """What schedulers and their scripts need of a start (docs/clusters.md)."""

    preflight: bool = setting(False, "measure all nodes before training, and name those that are slow or wrong")
    status_file: str | None = setting(None, "where rank 0 writes what has become of this start; null: nowhere")


@dataclass
class SweepConfig:
    """How the points of a sweep (`--multirun`) are started; a training itself takes no notice."""

    nproc_per_node: int = setting(1, "ranks of every point, started by torchrun where it is above 1", at_least=1)


@dataclass
class Config:
    """One run. The same config and seed give the same training on every layout."""

    run_dir: str = setting(None, "the run's folder; null: runs/<run_name>")
    run_name: str = setting(None, "null: <model>-<data>-<what the command sets>-<hash>")
    resume: str = setting("auto", "auto: a run in the folder goes on; never: it is refused", choices="auto|never")
    seed: int = setting(1234, "start values, data order and dropout all derive from it", at_least=0, at_most=2**63 - 1)
    device: str = setting("auto", "auto: cuda where present, else cpu", choices="auto|cpu|cuda")
    precision: str = setting("auto", "auto: bf16 where it is fast, else fp32", choices="auto|fp64|fp32|bf16|fp16")
    tokenizer: str = setting("bpe", "bpe (trained on the data), byte, char, or a transformers name or folder")
    phases: list[dict[str, Any]] = setting(
        [], "settings that change at planned steps: {until: STEP or share, SETTING: VALUE} each (docs/long_runs.md)"
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr: LearningRateConfig = field(default_factory=LearningRateConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    # No settings, but where they come from. `told`: words on what a folder gave, and what does nothing in this run.
    # Names of settings: `departures` from the presets by the command, and `derived` ones, which nobody gave.
    told: tuple[str, ...] = ()
    departures: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
