"""Hyperparameter search: trials of a conf with other values for some of its bindings.

- ``settings``: :class:`~alfx.search.search_settings.Search`, what a search conf says; ``space``: the values to try;
  ``search_conf``: reading and checking such a conf;
- ``searching``: the loop that starts runs, watches and ends them; ``study``: what has been tried (the only user of
  optuna); ``measure``: the value of a run; ``seeds``: the random seed of each run;
- ``runs``: a run and how it is executed here; ``run_process``: the process of a run; ``ray_runs``: runs on a cluster;
- ``folder``: the files of a search and its lock; ``results``: tables, picture and the best conf.
"""
