"""Pages about porting from ALF: the ported and the converted conf, and the table of names."""
import importlib
import pathlib
import re

import pytest

from alfx import gin_utils
from alfx.algorithms.config import TrainerConfig
from alfx.gin_utils import ConfError, python_to_gin
from alfx.trainers.policy_trainer import RLTrainer
from alfx.utils import common

PAGE = (pathlib.Path(__file__).parents[3] / 'docs' / 'coming_from_alf.md').read_text()
BLOCKS = {kind: text for kind, text in re.findall(r'<!-- (before|said of|file): pendulum.gin -->\n```\n(.*?)```', PAGE,
                                                  re.DOTALL)}
CONVERTING = (pathlib.Path(__file__).parents[3] / 'docs' / 'convert_python_confs.md').read_text()
COMMON = """
add_method as_list tuplify2d Periodically TargetUpdater PeriodicReset expand_dims_as reset_state_if_necessary
run_under_record_context cast_transformer image_scale_transformer get_gin_confg_strs summarize_gin_config
copy_gin_configs get_gin_file get_conf_file parse_conf_file get_epsilon_greedy summarize_config read_conf_file
write_config get_initial_policy_state get_initial_time_step set_global_env get_raw_observation_spec
set_transformed_observation_spec get_observation_spec get_states_shape get_action_spec get_reward_spec get_env
get_vocab_size active_action_target_entropy write_gin_configs warning_once warning info info_once set_random_seed
log_metrics detach set_exe_mode exe_mode_name is_replay is_rollout is_eval is_pretrain is_training mark_eval mark_replay
mark_rollout mark_pretrain eval_context replay_context rollout_context pretrain_context flattened_size
is_inside_docker_container check_numerics get_all_parameters snapshot_repo_roots generate_alf_snapshot
unzip_alf_snapshot get_alf_snapshot_env_vars abs_path alf_root is_repo_root compute_summary_or_eval_interval call_stack
get_unused_port
""".split()


@pytest.fixture
def conf(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield tmp_path / 'pendulum.gin'
    gin_utils.clear()


def test_the_page_shows_the_messages_about_the_conf(conf):
    conf.write_text(BLOCKS['before'])
    with pytest.raises(ConfError) as caught:
        gin_utils.load(conf.name)
    assert f'ConfError: {caught.value}\n' == BLOCKS['said of']


def test_the_converted_conf_trains_and_uses_every_line(conf):
    conf.write_text(BLOCKS['file'])
    gin_utils.load(conf.name, ['TrainerConfig.num_iterations = 40', 'TrainerConfig.initial_collect_steps = 20',
                               'TrainerConfig.num_checkpoints = 1', 'TrainerConfig.evaluate = False',
                               'create_environment.nonparallel = True', 'TrainerConfig.random_seed = 1'])
    RLTrainer(TrainerConfig(root_dir='run')).train()
    assert (conf.parent / 'run/progress.csv').exists()
    assert gin_utils.mistakes_of_unused(gin_utils.unused_bindings()) == []


def test_only_reported_or_environment_lines_change():
    before, after = (set(BLOCKS[kind].splitlines()) for kind in ('before', 'file'))
    reported = {int(line) for line in re.findall(r'pendulum.gin:(\d+): ', BLOCKS['said of'])}
    lines = BLOCKS['before'].splitlines()
    changed = {i for i, line in enumerate(lines, 1) if line not in after}
    assert changed == reported | {lines.index("create_environment.env_name = 'Pendulum-v0'") + 1}
    assert len(after - before) == len(changed) - 3  # the imports have gone


def test_the_page_has_a_row_for_every_name_of_alf_utils_common():
    table = PAGE.partition('## alf.utils.common')[2].partition('\n## ')[0]
    rows = re.findall(r'^\| (`.*?) \| (.*) \|$', table, re.MULTILINE)
    documented = [name for names, new_name in rows if 'alfx.utils.common' in new_name
                  for name in re.findall(r'`(\w+)`', names)]
    assert sorted(name for names, _ in rows for name in re.findall(r'`(\w+)`', names)) == sorted(COMMON)
    assert sorted(documented) == sorted(common.__all__) == sorted(set(COMMON) & set(vars(common)))


def test_names_of_alfx_in_the_table_exist():
    for name in re.findall(r'`(alfx(?:\.\w+)+)`', PAGE.partition('## alf.utils.common')[2]):
        module, _, last = name.rpartition('.')
        assert hasattr(importlib.import_module(module), last) or importlib.import_module(name)


def test_the_python_conf_of_the_page_converts_to_the_gin_file(conf):
    name, python = re.search(r'<!-- python: (\S+) -->\n```python\n(.*?)```', CONVERTING, re.DOTALL).groups()
    conf.with_name(name).write_text(python)
    found = python_to_gin.convert(name)
    assert found.problems == [] and f'<!-- file: sac_pendulum.gin -->\n```\n{found.text}```' in CONVERTING
