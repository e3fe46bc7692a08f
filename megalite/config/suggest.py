"""The setting that was most likely meant by an unknown one.

A right leaf in the wrong group (`train.lr`) counts more than a similar spelling; the words of other projects
(`learning_rate`, `n_layer`) are known too.
"""

from megalite.config.settings import EXPERIMENT, GROUPS, SETTINGS
from megalite.errors.remedies import nearest, similarity

# What the same thing is called in nanoGPT, Megatron-LM and transformers.
FOREIGN_WORDS = {
    "learning_rate": "optimizer.lr",
    "max_iters": "train.steps",
    "train_iters": "train.steps",
    "max_steps": "train.steps",
    "batch_size": "train.global_batch_size",
    "block_size": "train.seq_length",
    "sequence_length": "train.seq_length",
    "n_layer": "model.num_layers",
    "n_head": "model.num_attention_heads",
    "n_embd": "model.hidden_size",
    "num_hidden_layers": "model.num_layers",
    "intermediate_size": "model.ffn_hidden_size",
    "beta1": "optimizer.betas",
    "beta2": "optimizer.betas",
    "grad_clip": "optimizer.clip_grad",
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp",
    "virtual_pipeline_model_parallel_size": "parallel.vpp",
    "microbatch_group_size_per_vp_stage": "parallel.microbatch_group_size",
    "num_layers_in_first_pipeline_stage": "parallel.first_stage_layers",
    "num_layers_in_last_pipeline_stage": "parallel.last_stage_layers",
    "decoder_first_pipeline_num_layers": "parallel.first_stage_layers",
    "decoder_last_pipeline_num_layers": "parallel.last_stage_layers",
    "account_for_embedding_in_pipeline_split": "parallel.count_embedding",
    "account_for_loss_in_pipeline_split": "parallel.count_loss",
    "standalone_embedding_stage": "parallel.standalone_embedding",
    "pipeline_model_parallel_layout": "parallel.pipeline_layout",
    "use_distributed_optimizer": "optimizer.zero",
    "zero_stage": "optimizer.zero",
    "num_distributed_optimizer_instances": "optimizer.instances",
    "ddp_bucket_size": "optimizer.bucket_size",
    "overlap_grad_reduce": "optimizer.overlap",
    "overlap_param_gather": "optimizer.overlap",
    "loss_scale": "optimizer.initial_loss_scale",
    "async_save": "checkpoint.async",
    "dtype": "precision",
    "out_dir": "run_dir",
    "output_dir": "run_dir",
}
LENGTH = "train.steps=N: the length of a run is in steps of train.global_batch_size x train.seq_length tokens"
# What there is no setting for, and what takes its place.
SAID_OTHERWISE = dict.fromkeys(("tokens", "train_tokens", "max_tokens", "num_train_epochs", "epochs"), LENGTH)


def nearest_setting(name: str) -> str | None:
    """The setting or group that was most likely meant by the unknown dotted `name`."""
    leaf = name.rpartition(".")[2]
    if leaf in FOREIGN_WORDS:
        return FOREIGN_WORDS[leaf]
    same_leaf = [setting.name for setting in SETTINGS.values() if setting.leaf == leaf and setting.name != name]
    if same_leaf:
        return max(same_leaf, key=lambda candidate: similarity(candidate, name))
    group = name.rpartition(".")[0]
    leaves = {setting.leaf: setting.name for setting in SETTINGS.values()}
    own = {setting.leaf: setting.name for setting in SETTINGS.values() if setting.group == group}
    if group in GROUPS:  # only the last word is wrong: model.layers -> model.num_layers
        found = own.get(nearest(leaf, own, cutoff=0.5) or "") or leaves.get(nearest(leaf, leaves, cutoff=0.7) or "")
    elif group:
        found = nearest(name, SETTINGS, cutoff=0.7) or leaves.get(nearest(leaf, leaves, cutoff=0.7) or "")
    else:
        found = nearest(name, (*GROUPS, EXPERIMENT), cutoff=0.75) or leaves.get(nearest(leaf, leaves) or "")
    return found
