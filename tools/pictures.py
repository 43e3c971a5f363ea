"""Draw the figures of the documentation: learning curves, and an animation of trained agents.

    python tools/pictures.py curves ppo_cart_pole dqn_acrobot ...     # docs/images/learning_curves.svg
    python tools/pictures.py agents runs/cart_pole runs/pendulum ...  # docs/images/agents.gif

The curves come from docs/curves.json, which tools/results.py writes. The agents are loaded from their run folders.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alfx.reports.curves import Curve, average

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / 'docs' / 'images'
_LINE, _TEXT = '#2a7de1', '#808080'  # readable on white and on black
_LOG_RATIO = 8
_TILE, _FPS, _SECONDS, _COLORS = (200, 150), 12, 8, 64


def read_curves(path: Path) -> dict[str, dict[str, Any]]:
    """Read docs/curves.json: ``fingerprint``, ``env_name`` and ``runs`` (a list of ``[x, y]`` per seed) by conf."""
    return json.loads(path.read_text()) if path.exists() else {}


def as_curves(entry: dict[str, Any]) -> list[Curve]:
    """Return the curves of the runs of one conf."""
    points = [np.asarray(run, dtype=np.float64) for run in entry['runs'].values() if len(run) > 1]
    return [Curve(run[:, 0], run[:, 1]) for run in points]


def draw_curves(path: Path, panels: Sequence[tuple[str, Sequence[tuple[str, list[Curve]]]]], columns: int = 3) -> None:
    """Draw panels of returns over environment steps: the interquartile mean over seeds, and each seed as a thin line.

    Args:
        path: `.svg` or `.png` file.
        panels: title and lines of each panel; a line has a name and runs. There is no legend for a single line.
        columns: maximum number of panels in a row.
    """
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot
    from matplotlib.ticker import EngFormatter
    settings = {'svg.hashsalt': 'alfx', 'svg.fonttype': 'none', 'font.size': 8, 'text.color': _TEXT, 'font.family':
                'sans-serif', 'axes.labelcolor': _TEXT, 'xtick.color': _TEXT, 'ytick.color': _TEXT, 'axes.edgecolor':
                '#aaaaaa'}
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    with pyplot.rc_context(settings):
        most = max(len(lines) for _, lines in panels)
        legend_rows = 0 if most == 1 else -(-most // 2)
        width = 3 * columns if most == 1 else max(3 * columns, 6)
        figure, axes = pyplot.subplots(rows, columns, figsize=(width, 2.1 * rows + 0.17 * legend_rows), squeeze=False,
                                       layout='constrained')
        colors = pyplot.get_cmap('tab10' if most <= 10 else 'tab20').colors
        for axis in axes.flat[len(panels):]:
            axis.set_visible(False)
        for axis, (title, lines) in zip(axes.flat, panels):
            for i, (name, runs) in enumerate(lines):
                mean = average(runs)
                color = _LINE if len(lines) == 1 else colors[i % len(colors)]
                axis.plot(mean.x, mean.center, color=color, linewidth=1.5, label=name)
                for run in runs if len(runs) > 1 else ():
                    axis.plot(run.x, run.y, color=color, linewidth=0.7, alpha=0.4)
            ends = [run.x[-1] for _, runs in lines for run in runs]
            if max(ends) > _LOG_RATIO * min(ends):  # otherwise the short curves would be a vertical line
                axis.set_xscale('log')
            axis.set_title(title, fontsize=8)
            axis.xaxis.set_major_formatter(EngFormatter(sep=''))
            axis.grid(alpha=0.3)
            axis.spines[['top', 'right']].set_visible(False)
        for row in axes:
            row[0].set_ylabel('return')
        for axis in axes[-1]:
            axis.set_xlabel('environment steps')
        if most > 1:
            lines = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()
                     if not line.get_label().startswith('_')}
            figure.legend(lines.values(), lines, loc='outside lower center', ncols=2, frameon=False, fontsize=7)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, transparent=True, dpi=110, metadata={'Date': None} if path.suffix == '.svg' else None)
        pyplot.close(figure)


def film_of(root_dir: str, episodes: int, max_frames: int = 20_000) -> list[np.ndarray]:
    """Return the frames, uint8 ``[H, W, 3]``, of a video of the agent of a run, at :data:`_FPS` frames per second.

    Raises:
        RuntimeError: the run cannot be played.
    """
    import imageio
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'film.mp4')
        done = subprocess.run([sys.executable, '-m', 'alfx.bin.play', '--root_dir', root_dir, '--num_episodes',
                               str(episodes), '--record_file', path, '--random_seed', '1', '--max_frames',
                               str(max_frames)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f'{root_dir} cannot be played:\n{done.stderr[-2000:]}')
        with imageio.get_reader(path) as reader:
            fps = float(reader.get_meta_data()['fps'])
            frames = [np.asarray(frame) for frame in reader]
    indices = np.arange(0, len(frames), max(1.0, fps / _FPS)).astype(int)[:_FPS * _SECONDS]
    return [frames[i] for i in indices]


def fitted(frame: np.ndarray) -> np.ndarray:
    """Return the frame centered in a white tile of fixed size."""
    from PIL import Image
    picture = Image.fromarray(frame)
    picture.thumbnail(_TILE, Image.Resampling.LANCZOS)
    tile = Image.new('RGB', _TILE, 'white')
    tile.paste(picture, ((_TILE[0] - picture.width) // 2, (_TILE[1] - picture.height) // 2))
    return np.asarray(tile)


def write_agents(path: Path, films: Sequence[list[np.ndarray]]) -> None:
    """Write videos next to each other as one `.gif`; shorter ones are repeated."""
    from PIL import Image
    length = max(len(film) for film in films)
    tiled = [[fitted(frame) for frame in film] for film in films]
    rows = [np.concatenate([film[t % len(film)] for film in tiled], axis=1) for t in range(length)]
    pictures = [Image.fromarray(row).quantize(_COLORS, dither=Image.Dither.NONE) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=1000 // _FPS, loop=0, optimize=True)


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('what', choices=['curves', 'agents'])
    parser.add_argument('names', nargs='+', help='confs with stored curves, or run folders')
    parser.add_argument('--output', type=Path, help='output file')
    parser.add_argument('--episodes', type=int, default=3, help='episodes per agent')
    args = parser.parse_args()
    if args.what == 'agents':
        path = args.output or IMAGES / 'agents.gif'
        write_agents(path, [film_of(root_dir, args.episodes) for root_dir in args.names])
    else:
        path = args.output or IMAGES / 'learning_curves.svg'
        stored = read_curves(ROOT / 'docs' / 'curves.json')
        missing = [name for name in args.names if name not in stored]
        if missing:
            parser.error(f'no curves stored for {", ".join(missing)}; create them with tools/results.py')
        draw_curves(path, [(f"{name} ({stored[name]['env_name']})", [('', as_curves(stored[name]))])
                           for name in args.names])
    print(f'{path} ({path.stat().st_size:,} bytes)')
    return 0


if __name__ == '__main__':
    sys.exit(main())
