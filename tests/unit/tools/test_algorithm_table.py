"""docs/algorithms.md and the pages of algorithms list the present features."""
import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture
def algorithm_table(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'tools'))
    import algorithm_table
    return algorithm_table


def test_the_pages_are_current(algorithm_table):
    docs, pages = ROOT / 'docs', algorithm_table.pages()
    assert {f'algorithms/{path.name}' for path in (docs / 'algorithms').iterdir()} < set(pages)
    for name, current in pages.items():
        stored = (docs / name).read_text()
        if stored != current:
            changed = [line for line in current.splitlines() if line not in stored.splitlines()]
            pytest.fail(f'docs/{name} is out of date; run python tools/algorithm_table.py. New lines:\n'
                        + '\n'.join(changed[:10]))


def test_a_page_shows_arguments_confs_curves_and_tags():
    page = (ROOT / 'docs' / 'algorithms' / 'PPOAlgorithm.md').read_text()
    for part in ('[arXiv:1707.06347](', '- `action_spec`: ', '| `ppo_cart_pole` | CartPole-v1 | ',
                 '](../images/curves/ppo_cart_pole.svg)', '| `epsilon_greedy` | ',
                 '[PPOLoss](../reference/algorithms.md#ppoloss)', '| `train/approx_kl` | '):
        assert part in page


def test_every_stored_curve_has_a_picture():
    stored = json.loads((ROOT / 'docs' / 'curves.json').read_text())
    assert {path.stem for path in (ROOT / 'docs' / 'images' / 'curves').iterdir()} == set(stored)


def test_tags_of_an_algorithm_include_its_losses_and_bases(algorithm_table):
    from alfx.algorithms.dynamic_action_repeat_agent import DynamicActionRepeatAgent
    from alfx.algorithms.ppo_loss import PPOLoss
    from alfx.algorithms.taac_algorithm import TaacLAlgorithm
    losses = algorithm_table.losses_of(TaacLAlgorithm, {PPOLoss.__name__, 'Agent'})
    assert [loss.__name__ for loss in losses] == ['PPOLoss', 'TAACTDLoss', 'TDLoss']
    explained, further = algorithm_table.tags_of(TaacLAlgorithm, *losses)
    assert [row.split(' | ')[0] for row in explained] == [
        '| `train/explained_variance`', '| `train/entropy`', '| `train/approx_kl`', '| `train/clip_fraction`',
        '| `train/values`', '| `train/targets`']
    assert {'alpha/*', 'adv', 'td_error'} <= set(further)
    assert algorithm_table.tags_of(DynamicActionRepeatAgent) == ([], [])  # generated names are not listed


def test_every_policy_algorithm_of_the_confs_is_tried(algorithm_table):
    from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
    uses = algorithm_table.read_feature_uses()
    policies = {name for name, target in algorithm_table.algorithms_of(uses).items()
                if issubclass(target, OffPolicyAlgorithm)}
    within_others = {'CEMPlanAlgorithm', 'ICEMPlanAlgorithm', 'MCTSAlgorithm', 'MuzeroRepresentationLearner',
                     'RandomShootingAlgorithm'}
    assert policies - within_others <= set(algorithm_table.PROBES)


@pytest.mark.parametrize('name, kind, recurrent, can', [
    ('SacAlgorithm', 'mixed', True, True), ('DqnAlgorithm', 'discrete', True, True),
    ('DqnAlgorithm', 'continuous', False, False), ('TaacAlgorithm', 'continuous', True, False)])
def test_impossible_combinations_are_rejected(algorithm_table, name, kind, recurrent, can):
    assert (algorithm_table.try_to_make(name, kind, recurrent) is not None) == can


def test_a_failure_for_another_reason_is_no_refusal(algorithm_table, monkeypatch):
    probe = algorithm_table.PROBES['DqnAlgorithm']._replace(bindings=('DqnAlgorithm.num_critic_replicas = 0', ))
    monkeypatch.setitem(algorithm_table.PROBES, 'DqnAlgorithm', probe)
    with pytest.raises(algorithm_table.Unexpected, match='DqnAlgorithm of deep_q.gin for a discrete .*replicas'):
        algorithm_table.try_to_make('DqnAlgorithm', 'discrete', False)


@pytest.mark.parametrize('text, link', [
    ('# PPO on CartPole (Schulman et al. 2017, arXiv:1707.06347)',
     'Schulman et al. 2017, [arXiv:1707.06347](https://arxiv.org/abs/1707.06347)'),
    ('Random distillation, Burda et al. 2018 (arXiv:1810.12894).',
     'Burda et al. 2018, [arXiv:1810.12894](https://arxiv.org/abs/1810.12894)'),
    ('Counts (Strehl and Littman 2008, doi:10.1016/j.jcss.2007.08.009)',
     'Strehl and Littman 2008, [doi:10.1016/j.jcss.2007.08.009](https://doi.org/10.1016/j.jcss.2007.08.009)'),
    ('of its own (with nobody to cite)', '')])
def test_a_citation_becomes_a_link(algorithm_table, text, link):
    assert algorithm_table.papers(text) == link
