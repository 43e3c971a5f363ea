"""Environments of packages with an older or another interface, as users adapt them for gymnasium."""
import importlib.util

import gymnasium
import numpy as np


class Crafter(gymnasium.Env):
    """Crafter with every eighth pixel."""

    observation_space = gymnasium.spaces.Box(0, 1, (192, ), np.float32)
    action_space = gymnasium.spaces.Discrete(17)

    def __init__(self):
        import crafter
        self.env = crafter.Env(seed=int(np.random.SeedSequence().entropy % 2**31))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.env._seed = seed
        return self._observe(self.env.reset()), {}

    def step(self, action):
        image, reward, done, info = self.env.step(int(action))
        return self._observe(image), float(reward), done, False, {}

    def _observe(self, image):
        return image[::8, ::8].astype(np.float32).reshape(-1) / 255


class Mario(gymnasium.Env):
    """Super Mario Bros. with every sixteenth pixel."""

    observation_space = gymnasium.spaces.Box(0, 1, (240, ), np.float32)
    action_space = gymnasium.spaces.Discrete(256)

    def __init__(self):
        import gym_super_mario_bros
        self.env = gym_super_mario_bros.SuperMarioBrosEnv()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(self.env.reset()), {}

    def step(self, action):
        image, reward, done, info = self.env.step(int(action))
        return self._observe(image), float(reward), done, False, {}

    def _observe(self, image):
        return image[::16, ::16, 0].astype(np.float32).reshape(-1) / 255


gymnasium.register('Crafter-v0', Crafter, max_episode_steps=300)
gymnasium.register('Mario-v0', Mario, max_episode_steps=300)
for _package in 'panda_gym', 'highway_env', 'mo_gymnasium', 'flappy_bird_gymnasium':  # they register environments
    if importlib.util.find_spec(_package):
        importlib.import_module(_package)
