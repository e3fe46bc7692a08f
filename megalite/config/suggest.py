"""The setting that was most likely meant by an unknown one: known by other projects' word, or spelled alike."""

from megalite.config.settings import EXPERIMENT, GROUPS, SETTINGS
from megalite.errors.remedies import nearest, similarity

FOREIGN_WORDS = {  # what the same is called in nanoGPT, Megatron-LM and transformers
    "optimizer.lr": "learning_rate",
    "optimizer.betas": "beta1 beta2",
    "optimizer.clip_grad": "grad_clip",
    "optimizer.zero": "use_distributed_optimizer zero_stage",
    "optimizer.initial_loss_scale": "loss_scale",
    "train.steps": "max_iters train_iters max_steps",
    "train.global_batch_size": "batch_size",
    "train.seq_length": "block_size sequence_length",
    "model.num_layers": "n_layer num_hidden_layers",
    "model.num_attention_heads": "n_head",
    "model.hidden_size": "n_embd",
    "parallel.tp": "tensor_model_parallel_size",
    "parallel.pp": "pipeline_model_parallel_size",
    "parallel.vpp": "virtual_pipeline_model_parallel_size",
    "precision": "dtype",
    "run_dir": "out_dir output_dir",
}
BY_WORD = {word: name for name, words in FOREIGN_WORDS.items() for word in words.split()}
LENGTH = "train.steps=N: the length of a run is in steps of train.global_batch_size x train.seq_length tokens"
INSTEAD = {  # of what there is no setting for
    **dict.fromkeys(("tokens", "train_tokens", "max_tokens", "num_train_epochs", "epochs"), LENGTH),
    "_target_": "parts are chosen by name: model=NAME, model.norm=rmsnorm, model.activation=swiglu",
}


def nearest_setting(name: str) -> str | None:
    """The setting or group that was most likely meant by the unknown dotted `name`."""
    group, _, leaf = name.rpartition(".")
    if name in SETTINGS or name in GROUPS:
        return name
    same = [BY_WORD[leaf]] if leaf in BY_WORD else [one.name for one in SETTINGS.values() if one.leaf == leaf]
    if same:
        return max(same, key=lambda candidate: similarity(candidate, name))
    if group in GROUPS:  # only the last word is wrong: model.layers -> model.num_layers
        own = {setting.leaf: setting.name for setting in SETTINGS.values() if setting.group == group}
        return own.get(nearest(leaf, own, cutoff=0.5) or "")
    return nearest(name, (*SETTINGS, *GROUPS, EXPERIMENT), cutoff=0.7)
