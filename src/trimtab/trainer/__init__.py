"""The trainer, from a recipe to the files of a run.

    recipe    config, recipes        keys, bases, refused combinations
    tasks     tasks, environments    problems and prompts; episodes with tools
    rollout   rollout, engines       prompts to groups of responses, from samplers that report log-probs
    rewards   rewards, sandbox       verifiers; code of a model, with limits
    updates   run, loop, learner     and, beside them, features, models, checkpoint: batches, optional methods, networks
    files     trimtab.runs           metrics, trajectories, provenance

Around runs: evaluation (accuracy of a model), lab (grids of experiments) and cluster (processes as Ray actors).
"""
