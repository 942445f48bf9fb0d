"""The trainer, from a recipe to the files of a run.

    recipe    config, recipes        keys, bases, refused combinations; `requirements`: what the objective needs of them
    models    build_model, models    loaded or warm-started (`sft`), prepared for training, exported (`export`)
    tasks     tasks, environments    problems and prompts; episodes with tools
    rollout   rollout, engines       prompts to groups of responses, from samplers that report log-probs
    rewards   rewards, sandbox       verifiers; code of a model, with limits
    updates   run, loop, learner     builds a run; its steps; the updates of a step, with batches (`batch_preparation`,
                                     `packing`), the optimizer (`optim`), optional methods (`features`), statistics
                                     (`step_statistics`) and an objective given in code (`custom_objective`)
    files     trimtab.runs           metrics, trajectories, provenance; `checkpoint` to go on from

Small parts of all: `chat_template` renders, `stop` ends a run that is asked to or has no signal, `guard` returns to an
earlier checkpoint, `observer` has the events of a run and copies of its metrics, `processes` starts workers, `registry`
finds tasks and rewards by name, `seeds` derives random seeds.

Several ranks: `ranks` has the collectives, `followers` what ranks have in place of the leader's parts. Around runs:
evaluation (accuracy of a model; `held_out` during training), lab (grids of experiments) and cluster (Ray actors).
"""
