"""Hyperparameter search: trials of a conf with different values for some of its bindings.

- ``search_settings``: :class:`~alfx.search.search_settings.Search`, the settings; ``space``: the values to try;
  ``search_conf``: reads and checks a search conf;
- ``searching``: the loop that starts, monitors and stops runs; ``study``: the trials (the only module that uses
  optuna); ``measure``: the value of a run; ``seeds``: the random seed of each run;
- ``runs``: runs on this machine; ``run_process``: the process of a run; ``ray_runs``: runs on a Ray cluster;
- ``search_folder``: the files and the lock of a hyperparameter search; ``results``: tables, plot and the best conf.
"""
