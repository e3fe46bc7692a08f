"""The setting that was most likely meant by an unknown one: known by other projects' word, or spelled alike."""

from megalite.config.settings import EXPERIMENT, GROUPS, SETTINGS
from megalite.errors.remedies import nearest, similarity

# What the same thing is called in nanoGPT, Megatron-LM and transformers.
FOREIGN_WORDS = {
    "optimizer.lr": ("learning_rate",),
    "optimizer.betas": ("beta1", "beta2"),
    "optimizer.clip_grad": ("grad_clip",),
    "optimizer.zero": ("use_distributed_optimizer", "zero_stage"),
    "optimizer.instances": ("num_distributed_optimizer_instances",),
    "optimizer.bucket_size": ("ddp_bucket_size",),
    "optimizer.overlap": ("overlap_grad_reduce", "overlap_param_gather"),
    "optimizer.initial_loss_scale": ("loss_scale",),
    "train.steps": ("max_iters", "train_iters", "max_steps"),
    "train.global_batch_size": ("batch_size",),
    "train.seq_length": ("block_size", "sequence_length"),
    "model.num_layers": ("n_layer", "num_hidden_layers"),
    "model.num_attention_heads": ("n_head",),
    "model.hidden_size": ("n_embd",),
    "model.ffn_hidden_size": ("intermediate_size",),
    "parallel.tp": ("tensor_model_parallel_size",),
    "parallel.pp": ("pipeline_model_parallel_size",),
    "parallel.vpp": ("virtual_pipeline_model_parallel_size",),
    "parallel.microbatch_group_size": ("microbatch_group_size_per_vp_stage",),
    "parallel.first_stage_layers": ("num_layers_in_first_pipeline_stage", "decoder_first_pipeline_num_layers"),
    "parallel.last_stage_layers": ("num_layers_in_last_pipeline_stage", "decoder_last_pipeline_num_layers"),
    "parallel.count_embedding": ("account_for_embedding_in_pipeline_split",),
    "parallel.count_loss": ("account_for_loss_in_pipeline_split",),
    "parallel.standalone_embedding": ("standalone_embedding_stage",),
    "parallel.pipeline_layout": ("pipeline_model_parallel_layout",),
    "checkpoint.async": ("async_save",),
    "precision": ("dtype",),
    "run_dir": ("out_dir", "output_dir"),
}
BY_WORD = {word: name for name, words in FOREIGN_WORDS.items() for word in words}
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
