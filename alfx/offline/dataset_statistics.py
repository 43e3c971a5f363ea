"""Statistics of a dataset."""
from alfx.offline.dataset_episodes import Episodes
from alfx.offline.dataset_files import Dataset, arrays_of, normalized_score


def summary(dataset: Dataset) -> dict[str, float]:
    """Return statistics: numbers of episodes and actions, returns, lengths, fraction terminated, and score if known."""
    episodes = dataset.episodes
    returns = episodes.returns()
    found = {'episodes': len(episodes.lengths), 'actions': episodes.num_actions,
             'return_mean': returns.mean(), 'return_std': returns.std(), 'return_min': returns.min(),
             'return_max': returns.max(), 'length_mean': episodes.lengths.mean(), 'length_min': episodes.lengths.min(),
             'length_max': episodes.lengths.max(), 'terminated': episodes.terminated().mean()}
    reference = dataset.reference_returns()
    if reference is not None:
        found['normalized_score'] = normalized_score(float(returns.mean()), reference)
    return {name: float(x) for name, x in found.items()}


def lines(dataset: Dataset) -> list[str]:
    """Return the statistics as lines of text."""
    x = summary(dataset)
    result = [f'{dataset.name}: {x["episodes"]:,.0f} episodes, {x["actions"]:,.0f} actions',
              f'  return {x["return_mean"]:.6g} +- {x["return_std"]:.4g}, from {x["return_min"]:.6g} to '
              f'{x["return_max"]:.6g}',
              f'  length {x["length_mean"]:.6g}, from {x["length_min"]:.0f} to {x["length_max"]:.0f}',
              f'  terminated: {x["terminated"]:.1%} of the episodes' + (
                  '' if x['terminated'] else ' (none: all were truncated, and their last values are bootstrapped)')]
    given = dataset.about.get('reference_returns')
    if 'normalized_score' in x:
        result.append(f'  normalized score {x["normalized_score"]:.1f}')
    elif given:
        result.append('  no normalized score: expected the return of a random policy and a higher return, found '
                      f'{", ".join(map(str, given))}')
    else:
        result.append('  no normalized score: the returns of a random and an expert policy are unknown '
                      '(--reference_returns)')
    return result


def array_lines(episodes: Episodes) -> list[str]:
    """Return one line with the type, shape and range of each leaf of observation and action."""
    return [f'{name}: {x.dtype} {x.shape[1:]}, from {x.min():.6g} to {x.max():.6g}'
            for name, x in arrays_of(episodes).items() if x.size and name.split('.')[0] in ('observation', 'action')]
