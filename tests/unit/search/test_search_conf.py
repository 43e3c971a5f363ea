"""Confs of searches: errors are found before the first trial."""
import pytest
from search_tools import BOWL, TRAINING, prepared

from alfx import gin_utils
from alfx.gin_utils import ConfError
from alfx.search import search_conf
from alfx.search.search_conf import full_name
from alfx.search.search_folder import SearchFolder
from alfx.search.search_settings import Search

SPACE = "Search.space = {'TrainerConfig.unroll_length': [1, 2, 3, 4, 5, 6]}"


def with_space(space):
    return TRAINING.replace(SPACE, f'Search.space = {{{space}}}')


@pytest.mark.parametrize('space, message', [
    ("'TrainerConfig.unrol_length': [1]", "search.gin:4: .*no parameter 'unrol_length'\n.*did you mean 'unroll_"),
    ("'TrainrConfig.unroll_length': [1]", "no configurable 'TrainrConfig'\n.*did you mean 'TrainerConfig'"),
    ("'TrainerConfig.unroll_length': ['long']", "search.gin:4: .*expects float, found str 'long'"),
    ("'TrainerConfig.algorithm_ctor': [@Agent, @Agnt]", "no configurable '@Agnt'"),
    ("'TrainerConfig.epsilon_greedy': 'uniform(0, 2)'", 'search.gin:4: .*epsilon_greedy must be a number in'),
    ("'TrainerConfig.random_seed': 'integer(0, 9)'", 'cannot be searched: each run gets its own seed'),
    ("'TrainerConfig.root_dir': ['a']", 'cannot be searched: each run gets its own folder'),
    ("'Search.num_trials': [1]", 'cannot be searched: it is a setting of the hyperparameter search'),
    ("'unroll': [1, 2]", 'the conf does not use the macro %unroll'),
    ("'Trainer Config': [1, 2]", 'is not the name of a binding'),
    ("3: [1, 2]", 'the name of a binding in quotes'),
    ("'TrainerConfig.unroll_length': [1], 'config.TrainerConfig.unroll_length': [2]", 'are the same binding'),
    ("'TrainerConfig.unroll_length': 'intger(1, 2)'", "search.gin:4: .*did you mean 'integer'"),
])
def test_an_error_in_the_search_space_is_found_before_any_run(space, message, tmp_path):
    with pytest.raises(ConfError, match=f'(?s){message}'):
        prepared(tmp_path, with_space(space))
    assert not (tmp_path / 'search' / 'trials').exists()


def test_an_unused_scope_is_detected(tmp_path):
    text = TRAINING + 'Agent.optimizer = @ppo/Adam()\n'
    with pytest.raises(ConfError, match="(?s)no reference uses the scope 'pppo'.*did you mean 'ppo'"):
        prepared(tmp_path, text.replace(SPACE, "Search.space = {'pppo/Adam.lr': 'log_uniform(1e-5, 1e-2)'}"))


def test_a_macro_can_be_searched(tmp_path):
    text = with_space("'length': [1, 2]") + 'TrainerConfig.unroll_length = %length\nlength = 3\n'
    assert list(prepared(tmp_path, text).space) == ['length']


def test_a_conf_without_evaluation_needs_training_as_the_objective(tmp_path):
    text = TRAINING.replace('evaluate = True', 'evaluate = False')
    with pytest.raises(ConfError, match='(?s)does not evaluate.*TrainerConfig.evaluate = True'):
        prepared(tmp_path, text)
    prepared(tmp_path, text + "Search.measured_in = 'training'\n")


def test_trials_share_the_rest_of_the_conf(tmp_path):
    text = TRAINING.replace(SPACE, "Search.space = {'TrainerConfig.unroll_length': [%few, 2]}") + 'few = 1\n'
    conf = prepared(tmp_path, text)
    assert 'Search' not in conf.base_text and 'few' not in conf.base_text
    with gin_utils.loaded(str(tmp_path / 'search' / 'search' / 'base.gin')) as base:
        assert [binding.text.split('.')[-1] for binding in base.bindings] == ['algorithm_ctor', 'evaluate']


def test_a_conf_without_a_search_raises_with_a_remedy(tmp_path):
    with pytest.raises(ConfError, match='(?s)is not a search conf.*add Search.space'):
        prepared(tmp_path, 'TrainerConfig.algorithm_ctor = @Agent\n')


def test_full_name_matches_the_operative_conf():
    assert full_name('ppo/TrainerConfig.seed') == 'ppo/alfx.algorithms.config.TrainerConfig.seed'
    assert full_name('load.max_episode_steps') == 'alfx.environments.suite_gym.load.max_episode_steps'
    assert full_name('lr') == 'lr'


@pytest.mark.parametrize('line, message', [
    ("Search.sampler = 'tpee'", "(?s)sampler must be one of.*did you mean 'tpe'"), ('Search.num_trials = 0', 'int in'),
    ("Search.pruner_arguments = {'n_startup_trials': 1}", "the pruner is 'none'"),
    ("Search.score_window = 3", "the score is 'last'"), ("Search.ray_address = 'auto'", "executor is 'inline'"),
    ('Search.num_parallel = 2', 'runs one call at a time'), ("Search.measure = 'loss'", 'return value of Search.f'),
    ("Search.executr = 'process'", "did you mean 'executor'"), ("Search.function = @bowl()", 'write @name'),
    ("Search.space = {}\nSearch.num_trials = 3", 'use num_seeds'), ("Search.device = 'cuda'", 'is set, but'),
    ('Search.num_trials = 1.5', 'num_trials')])
def test_settings_that_are_wrong_or_would_be_ignored_are_rejected(line, message, tmp_path):
    with pytest.raises(ConfError, match=message):
        prepared(tmp_path, BOWL + line)


def test_training_is_never_inline():
    with pytest.raises(ConfError, match='which requires a Search.function'):
        Search(space={'x': [1]}, executor='inline')


def test_only_user_bindings_must_be_used_in_each_trial(tmp_path):
    """Bindings of the user must be used in each trial; included and searched ones need not be."""
    (tmp_path / 'base.gin').write_text('TrainerConfig.num_threads = 1\n')
    text = "include 'base.gin'\n" + with_space("'TrainerConfig.unroll_length': [1, 2]")
    used = prepared(tmp_path, text + 'TrainerConfig.mini_batch_size = 64\n').must_be_used
    names = [name.split('.')[-1] for name in used]
    assert 'mini_batch_size' in names and 'num_threads' not in names and 'unroll_length' not in names
    resumed = search_conf.prepare(gin_utils.load(str(tmp_path / 'search' / 'search' / 'search.gin')),
                                  SearchFolder(str(tmp_path / 'search')))
    assert resumed.must_be_used == ()


def test_if_the_space_changes_what_is_built_no_binding_must_be_used(tmp_path):
    assert prepared(tmp_path, with_space("'TrainerConfig.evaluate': [True, False]")).must_be_used == ()


def test_a_required_binding_is_checked_where_others_may_be_unused(tmp_path):
    path = tmp_path / 'mine.gin'
    path.write_text('TrainerConfig.mini_batch_size = 64\nAdam.eps = 1.0\n')
    name = 'alfx.algorithms.config.TrainerConfig.mini_batch_size'
    gin_utils.load(str(path), allow_unused=True, must_be_used=[name])
    with pytest.raises(ConfError) as caught:
        gin_utils.refuse_unused(gin_utils.unused_bindings())
    assert 'mini_batch_size' in str(caught.value) and 'Adam.eps' not in str(caught.value)
    gin_utils.load(str(path), allow_unused=True)
    gin_utils.refuse_unused(gin_utils.unused_bindings())
    gin_utils.clear()


def test_the_best_conf_finds_the_modules_of_the_search_conf(tmp_path):
    (tmp_path / 'module_of_a_search.py').write_text('VALUE = 1\n')
    prepared(tmp_path, 'import module_of_a_search\n' + TRAINING)
    copies = [tmp_path / 'search' / 'module_of_a_search.py', tmp_path / 'search' / 'search' / 'module_of_a_search.py']
    assert all(path.read_text() == 'VALUE = 1\n' for path in copies)  # next to best.gin, and to the conf of the trials
    (tmp_path / 'module_of_a_search.py').write_text('VALUE = 2\n')
    prepared(tmp_path, 'import module_of_a_search\n' + TRAINING)
    assert all(path.read_text() == 'VALUE = 2\n' for path in copies)  # no trial has started
    (tmp_path / 'search' / 'search' / 'study.log').touch()
    prepared(tmp_path, 'import module_of_a_search\n' + TRAINING)
    (tmp_path / 'module_of_a_search.py').write_text('VALUE = 3\n')
    with pytest.raises(ConfError, match='module_of_a_search.py: changed since the hyperparameter search'):
        prepared(tmp_path, 'import module_of_a_search\n' + TRAINING)
    assert all(path.read_text() == 'VALUE = 2\n' for path in copies)
