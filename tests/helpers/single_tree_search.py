"""A tree search on one tree of Python objects, written from the rules: slow and easy to read.

It shares nothing with ``alfx.tree_search`` but the meaning of the settings and of the random numbers. Policies are
solved by bisection, exponentials are those of ``math``.
"""
import math


class Node:
    """A node with the predictions of the model and the results of its subtree.

    Args:
        value, prior: predictions of the model.
        reward: reward for arriving here.
        player: player to move.
        over: whether the game is over.
        depth: depth in the tree; 0 for the root.
        key: key of this state in the model.
    """

    def __init__(self, value, prior, reward=0.0, player=0, over=False, depth=0, key=()):
        self.value, self.prior, self.reward = value, list(prior), reward
        self.player, self.depth, self.key = player, depth, key
        self.over = over or not any(p > 0 for p in prior)
        self.children = {}
        self.visits, self.total = 0, 0.0

    @property
    def mean(self):
        return self.total / self.visits


class SingleTreeSearch:
    """A search of one tree.

    Args:
        settings: ``SearchSettings``.
        model: called as ``model(key, action)``; returns ``(value, reward, over, prior, key)`` of the next state.
        draw: called as ``draw(step, path, depth)``; a number in [0, 1) for a sampled choice.
        ties: called as ``ties(step, path)``; numbers to add to the bounds.
        gumbel: noise of the actions of the root.
    """

    def __init__(self, settings, model, draw=None, ties=None, gumbel=None):
        self.s, self.model, self.draw, self.ties, self.gumbel = settings, model, draw, ties, gumbel

    def run(self, value, prior, player=0, key=()):
        """Return the root after the search."""
        s = self.s
        self.root = Node(value, prior, player=player, key=key)
        self.root.over = False
        self.root.visits, self.root.total = 1, value
        self.seen = [value]
        if s.expand_root:
            self.back_up([self.root], self.expand_all(self.root))
        for step in range(s.num_simulations // s.num_parallel):
            earlier, leaves = [], []
            for path in range(s.num_parallel):
                edges, node = [], self.root
                while not (node.over or node.depth >= s.max_depth - s.expand_all):
                    if s.expand_all and not node.children:
                        break
                    action = self.choose(node, step, path, earlier)
                    edges.append((node, action))
                    if action not in node.children:
                        break
                    node = node.children[action]
                earlier.append(edges)
                leaves.append(node)
            for edges, node in zip(earlier, leaves):
                self.grow(edges, node)
        return self.root

    # Expansion -----------------------------------------------------------------------------------------------------

    def grow(self, edges, node):
        trunk = [above for above, _ in edges]
        if node.over or node.depth >= self.s.max_depth - self.s.expand_all:
            self.back_up([*trunk, node], node.value)
        elif self.s.expand_all:
            self.back_up([*trunk, node], self.expand_all(node))
        else:
            parent, action = edges[-1]
            if action not in parent.children:
                self.add(parent, action)
            child = parent.children[action]
            self.back_up([*trunk, child], child.value)

    def add(self, parent, action):
        value, reward, over, prior, key = self.model(parent.key, action)
        player = 1 - parent.player if self.s.two_players else 0
        parent.children[action] = Node(value, prior, reward, player, over, parent.depth + 1, key)

    def expand_all(self, node):
        actions = [a for a, p in enumerate(node.prior) if p > 0]
        for action in actions:
            self.add(node, action)
            child = node.children[action]
            child.visits, child.total = 1, child.value
            self.seen.append(self.q(child))
        mass = sum(node.prior[a] for a in actions)
        return sum(node.prior[a] * self.q(node.children[a]) for a in actions) / mass

    def back_up(self, nodes, value):
        for node in reversed(nodes):
            node.visits += 1
            node.total += value
            self.seen.append(node.mean if node is self.root else self.q(node))
            value = node.reward + self.s.discount * value

    def q(self, node):
        return node.reward + self.s.discount * node.mean

    # Selection ----------------------------------------------------------------------------------------------------

    def score(self, value, player):
        low, high = self.s.known_bounds or (min(self.seen), max(self.seen))
        score = (value - low) / max(high - low, self.s.min_max_delta)
        return 1 - score if self.s.two_players and player == 1 else score

    def scores(self, node):
        known = {a: self.score(self.q(child), node.player) for a, child in node.children.items()}
        how, values = self.s.unexpanded_value, list(known.values())
        if not isinstance(how, str):
            rest = how
        elif how == 'mean_with_parent':
            own = min(max(self.score(node.mean, node.player), 0.0), 1.0)
            rest = (sum(values) + own) / (len(values) + 1)
        elif not values:
            rest = 0.5
        else:
            rest = {'max': max, 'min': min, 'none': min, 'mean': lambda x: sum(x) / len(x)}[how](values)
        return [known.get(a, rest) for a in range(len(node.prior))]

    def factor(self, visits, minus_one=False):
        n = max(visits - 1, 0) if minus_one else visits
        return (math.log((n + self.s.pb_c_base + 1) / self.s.pb_c_base) + self.s.pb_c_init) * math.sqrt(n)

    def choose(self, node, step, path, earlier):
        s = self.s
        if s.rule in ('rkl', 'kl'):
            policy, number = self.policy(node, s.rule), self.draw(step, path, node.depth)
            reached = 0.0
            for action, p in enumerate(policy):
                reached += p
                if p > 0 and reached > number * sum(policy):
                    return action
        actions = [action for edges in earlier for above, action in edges if above is node]
        visits = [node.children[a].visits if a in node.children else 0 for a in range(len(node.prior))]
        visits = [n + actions.count(a) for a, n in enumerate(visits)]
        allowed = [a for a, p in enumerate(node.prior) if p > 0]
        if s.rule == 'gumbel':
            return self.gumbel_choice(node, visits, allowed, len(actions))
        scores, ties = self.scores(node), self.ties(step, path)
        factor = self.factor(node.visits + len(actions), s.minus_one)
        return max(allowed, key=lambda a: scores[a] + factor * node.prior[a] / (1 + visits[a]) + ties[a])

    def policy(self, node, kind):
        """Return the regularized policy at ``node``."""
        allowed = [a for a, p in enumerate(node.prior) if p > 0]
        part = [a for a in allowed if a in node.children] if self.s.unexpanded_value == 'none' else allowed
        policy = list(node.prior)
        if part:
            c = self.factor(node.visits) / (node.visits + len(allowed))
            mass, scores = sum(node.prior[a] for a in part), self.scores(node)
            solve = reverse_kl if kind == 'rkl' else forward_kl
            for a, p in zip(part, solve([scores[a] for a in part], [node.prior[a] / mass for a in part], c)):
                policy[a] = p * mass
        return policy

    # Gumbel ------------------------------------------------------------------------------------------------------

    def gumbel_choice(self, node, visits, allowed, extra):
        sigma = self.sigma(node, visits)
        logits = {a: math.log(node.prior[a]) + sigma[a] for a in allowed}
        if node is self.root:
            m = min(self.s.max_num_considered, len(allowed))
            considered = considered_visits(m, self.s.num_simulations)[node.visits - 1 + extra]
            return max((a for a in allowed if visits[a] == considered), key=lambda a: self.gumbel[a] + logits[a])
        improved = softmax(logits)
        return max(allowed, key=lambda a: improved[a] - visits[a] / (1 + sum(visits)))

    def sigma(self, node, visits):
        sign = -1.0 if self.s.two_players and node.player == 1 else 1.0
        q = {a: sign * self.q(child) for a, child in node.children.items()}
        mixed = sign * node.value
        if q:
            mass = sum(node.prior[a] for a in q)
            mean = sum(node.prior[a] * q[a] for a in q) / mass
            mixed = (sign * node.value + sum(visits) * mean) / (1 + sum(visits))
        values = [q.get(a, mixed) for a in range(len(node.prior))]
        scale = (self.s.maxvisit_init + max(visits)) * self.s.value_scale
        return [scale * (x - min(values)) / max(max(values) - min(values), 1e-8) for x in values]


def softmax(logits):
    highest = max(logits.values())
    weights = {a: math.exp(x - highest) for a, x in logits.items()}
    return {a: w / sum(weights.values()) for a, w in weights.items()}


def forward_kl(values, prior, c):
    highest = max(values)
    weights = [q * math.exp((v - highest) / c) for v, q in zip(values, prior)]
    return [w / sum(weights) for w in weights]


def reverse_kl(values, prior, c):
    """Return ``p = c q / (alpha - v)``, alpha by bisection between ``max(v)`` and ``max(v) + c``."""
    low, high = 0.0, 1.0  # (alpha - max v) / c
    u = [(v - max(values)) / c for v in values]
    for _ in range(200):
        beta = (low + high) / 2
        total = sum(q / (beta - x) if beta > x else math.inf for q, x in zip(prior, u))
        low, high = (beta, high) if total > 1 else (low, beta)
    return [q / (high - x) for q, x in zip(prior, u)]


def considered_visits(m, num_simulations):
    """Return the visits of sequential halving among m actions, from its description."""
    if m <= 1:
        return list(range(num_simulations))
    visits, remaining, sequence = [0] * m, m, []
    phases = math.ceil(math.log2(m))
    while len(sequence) < num_simulations:
        for _ in range(max(1, int(num_simulations / (phases * remaining)))):
            for a in range(remaining):
                sequence.append(visits[a])
                visits[a] += 1
        remaining = max(2, remaining // 2)
    return sequence[:num_simulations]
