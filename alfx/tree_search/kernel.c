/* The two halves of a simulation, tree by tree; bit-identical to tensor_search.py in double precision.

   Every expression is evaluated in the order of the tensor version, and sums run from the first action to the last.
   Compile without contraction (-ffp-contract=off) and without -ffast-math. rules.py explains the formulas, trees.py the
   columns; a row of the tree is a pair of rows of `ints` and `floats`. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { VISITS, PARENT, ACTION, TO_PLAY, OVER, DEPTH, CHILDREN, CHILD };
enum { VALUE_SUM, VALUE, REWARD, PRIOR };
enum { UCB, RKL, KL, GUMBEL };
enum { CONSTANT, MAX, MIN, MEAN, MEAN_WITH_PARENT, NONE };

#define MAX_NEWTON_STEPS 64
#define NEWTON_TOLERANCE 1e-12
#define TINY 2.2250738585072014e-308

/* Data of a search; native_search.py has the same fields in the same order. */
typedef struct {
    int64_t num_trees, num_nodes, num_actions, num_paths, num_depths, num_simulations;
    int64_t rule, unexpanded, two_players, depth_limit, fixed_bounds, expand_all;
    double unexpanded_value, min_max_delta, discount, value_scale, maxvisit_init;
    int32_t *ints;           /* [B, N, CHILD + 2 A] */
    double *floats;          /* [B, N, PRIOR + 3 A] */
    double *bounds;          /* [B, 2] */
    int64_t *chosen;         /* [3, K, B], K = num_paths; a step may use fewer paths */
    int64_t *paths;          /* [B, K, depths, 2]: at greater depth the paths of a step never meet */
    const double *factors;   /* indexed by the visits of the parent */
    const double *ties;      /* [steps, K, B, A] */
    const int64_t *seeds;    /* [steps, K, B] */
    const double *gumbel;    /* [B, A] */
    const int64_t *considered;      /* [m + 1, simulations] */
    const int64_t *num_considered;  /* [B] */
    double *scratch;         /* [3, A] */
} Search;

/* A node with the data for choosing one of its actions. */
typedef struct {
    int64_t A;
    const int32_t *child, *child_visits;
    const double *prior, *value, *log_prior, *visits; /* visits: including assumed visits */
    int32_t own_visits;                               /* including assumed visits */
    double own_value, low, span;
    int second;                                       /* the second player is to move */
    double *scores, *shares;
} Node;

static int32_t *ints_of(const Search *s, int64_t b, int64_t n) {
    return s->ints + (b * s->num_nodes + n) * (CHILD + 2 * s->num_actions);
}

static double *floats_of(const Search *s, int64_t b, int64_t n) {
    return s->floats + (b * s->num_nodes + n) * (PRIOR + 3 * s->num_actions);
}

static const double EXP_COEFFICIENTS[14] = {
    1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0,
    1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 1.0 / 2.0, 1.0, 1.0};

/* exp(x) for x <= 0: exp(k ln 2 + r) = 2^k (1 + r + r^2/2 + ...) with |r| <= ln(2) / 2. It has no branches, and k needs
   no conversion, so compilers can vectorize it: 1.5 * 2^52 + k has k in its lowest bits. */
static inline double small_exp(double x) {
    double shifted = x * 1.4426950408889634 + 6755399441055744.0, k = shifted - 6755399441055744.0, scale;
    double r = (x - k * 0.693145751953125) - k * 1.42860682030941723212e-6;
    double p = EXP_COEFFICIENTS[0];
    for (int i = 1; i < 14; i++) p = p * r + EXP_COEFFICIENTS[i];
    uint64_t power;
    memcpy(&power, &shifted, sizeof power);
    power = (power + 1023) << 52; /* 2^k, a normal number */
    memcpy(&scale, &power, sizeof scale);
    return x < -700.0 ? 0.0 : p * scale;
}

/* Number in [0, 1) for a path and a depth: splitmix64. */
static double uniform(int64_t seed, int64_t depth) {
    uint64_t z = (uint64_t)seed + (uint64_t)(depth + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    return (double)(z >> 11) * 0x1p-53;
}

static double larger(double x, double y) { return y > x ? y : x; } /* x if y is NaN */
static double smaller(double x, double y) { return y < x ? y : x; }

static double normalized(const Node *n, double value) {
    double score = (value - n->low) / n->span;
    return n->second ? 1.0 - score : score;
}

static void value_scores(const Node *n, int64_t unexpanded, double constant) {
    int64_t count = 0;
    double total = 0.0, best = -INFINITY, worst = INFINITY, rest;
    for (int64_t a = 0; a < n->A; a++)
        if (n->child[a]) {
            double score = normalized(n, n->value[a]);
            n->scores[a] = score;
            count++;
            total += score;
            best = larger(best, score);
            worst = smaller(worst, score);
        }
    if (unexpanded == CONSTANT) rest = constant;
    else if (unexpanded == MEAN_WITH_PARENT)
        rest = (total + smaller(larger(normalized(n, n->own_value), 0.0), 1.0)) / (double)(count + 1);
    else if (!count) rest = 0.5;
    else if (unexpanded == MAX) rest = best;
    else if (unexpanded == MEAN) rest = total / (double)count;
    else rest = worst;
    for (int64_t a = 0; a < n->A; a++)
        if (!n->child[a]) n->scores[a] = rest;
}

static int64_t best_upper_bound(const Node *n, double factor, const double *ties) {
    double best = -INFINITY;
    int64_t choice = 0;
    for (int64_t a = 0; a < n->A; a++)
        if (n->prior[a] > 0) {
            double score = n->scores[a] + n->prior[a] * factor / (1.0 + n->visits[a]) + ties[a];
            if (score > best) { best = score; choice = a; }
        }
    return choice;
}

static double highest_score(const Node *n, const double *prior) {
    double highest = -INFINITY;
    for (int64_t a = 0; a < n->A; a++)
        if (prior[a] > 0) highest = larger(highest, n->scores[a]);
    return highest;
}

/* Replace the scores by p[a] = prior[a] / (beta - (score[a] - max) / c), beta by Newton's method; not normalized. */
static void reverse_kl_policy(const Node *n, const double *prior, double c) {
    double highest = highest_score(n, prior), beta = -INFINITY, *u = n->scores;
    for (int64_t a = 0; a < n->A; a++) {
        u[a] = (u[a] - highest) / c;
        if (prior[a] > 0) beta = larger(beta, prior[a] + u[a]);
    }
    for (int step = 0; step < MAX_NEWTON_STEPS; step++) {
        double excess = 0.0, slope = 0.0;
        for (int64_t a = 0; a < n->A; a++)
            if (prior[a] > 0) {
                double part = prior[a] / (beta - u[a]);
                excess += part;
                slope += part / (beta - u[a]);
            }
        excess -= 1.0;
        if (fabs(excess) <= NEWTON_TOLERANCE) break;
        double following = beta + excess / slope;
        if (following == beta) break;
        beta = following;
    }
    for (int64_t a = 0; a < n->A; a++) u[a] = prior[a] > 0 ? prior[a] / (beta - u[a]) : 0.0;
}

/* Replace the scores by p[a] = prior[a] exp((score[a] - max) / c); not normalized. */
static void kl_policy(const Node *n, const double *prior, double c) {
    double highest = highest_score(n, prior), *p = n->scores;
    for (int64_t a = 0; a < n->A; a++) p[a] = prior[a] > 0 ? prior[a] * small_exp((p[a] - highest) / c) : 0.0;
}

static int64_t draw(const Node *n, double number) {
    double total = 0.0, reached = 0.0;
    int64_t choice = 0;
    for (int64_t a = 0; a < n->A; a++) total += n->scores[a];
    for (int64_t a = 0; a < n->A && !(reached > number * total); a++) {
        reached += n->scores[a];
        if (n->scores[a] > 0) choice = a;
    }
    return choice;
}

static int64_t draw_from_policy(const Search *s, const Node *n, double factor, double number) {
    int64_t count = 0, keep = s->unexpanded == NONE;
    double mass = 0.0, total = 0.0;
    for (int64_t a = 0; a < n->A; a++) {
        count += n->prior[a] > 0;
        n->shares[a] = !keep || n->child[a] ? n->prior[a] : 0.0;
        mass += n->shares[a];
    }
    if (mass > 0) {
        double c = larger(factor / (double)(n->own_visits + count), TINY);
        for (int64_t a = 0; a < n->A; a++) n->shares[a] = n->shares[a] / mass;
        if (s->rule == KL) kl_policy(n, n->shares, c);
        else reverse_kl_policy(n, n->shares, c);
        for (int64_t a = 0; a < n->A; a++) total += n->scores[a];
    }
    for (int64_t a = 0; a < n->A; a++)
        n->scores[a] = keep && !n->child[a] ? n->prior[a] : n->scores[a] / total * mass;
    return draw(n, number);
}

/* Replace the scores by sigma(q), with the mixed value for unexpanded actions. */
static void completed_values(const Search *s, const Node *n) {
    double sign = n->second ? -1.0 : 1.0, mass = 0.0, count = 0.0, most = -INFINITY, mean = 0.0;
    for (int64_t a = 0; a < n->A; a++) {
        count += n->visits[a];
        most = larger(most, n->visits[a]);
        if (!n->child[a]) continue;
        mass += larger(n->prior[a], TINY);
        mean += larger(n->prior[a], TINY) * (sign * n->value[a]);
    }
    if (mass > 0) mean = mean / mass;
    double mixed = (sign * n->own_value + count * mean) / (count + 1.0), low = INFINITY, high = -INFINITY;
    for (int64_t a = 0; a < n->A; a++) {
        n->scores[a] = n->child[a] ? sign * n->value[a] : mixed;
        low = smaller(low, n->scores[a]);
        high = larger(high, n->scores[a]);
    }
    double scale = (s->maxvisit_init + most) * s->value_scale / larger(high - low, 1e-8);
    for (int64_t a = 0; a < n->A; a++) n->scores[a] = scale * (n->scores[a] - low);
}

static int64_t gumbel_root(const Node *n, const double *gumbel, int64_t considered) {
    double best = -INFINITY;
    int64_t choice = 0;
    for (int64_t a = 0; a < n->A; a++)
        if (n->prior[a] > 0 && n->visits[a] == (double)considered) {
            double score = gumbel[a] + n->log_prior[a] + n->scores[a];
            if (score > best) { best = score; choice = a; }
        }
    return choice;
}

static int64_t gumbel_inside(const Node *n) {
    double count = 0.0, highest = -INFINITY, total = 0.0, best = -INFINITY, *weights = n->scores;
    int64_t choice = 0;
    for (int64_t a = 0; a < n->A; a++) {
        count += n->visits[a];
        weights[a] = n->log_prior[a] + n->scores[a]; /* -infinity where the prior is 0 */
        highest = larger(highest, weights[a]);
    }
    for (int64_t a = 0; a < n->A; a++) weights[a] = small_exp(weights[a] - highest);
    for (int64_t a = 0; a < n->A; a++) total += weights[a];
    double share = 1.0 / total, part = 1.0 / (1.0 + count);
    for (int64_t a = 0; a < n->A; a++) {
        double score = weights[a] * share - n->visits[a] * part;
        if (n->prior[a] > 0 && score > best) { best = score; choice = a; }
    }
    return choice;
}

static int64_t *path_of(const Search *s, int64_t b, int64_t k, int64_t depth) {
    return s->paths + ((b * s->num_paths + k) * s->num_depths + depth) * 2;
}

/* Write the visits of the actions of node `at` into the scratch, including visits assumed for earlier paths of this
   step; return the number of assumed visits. */
static int64_t count_visits(const Search *s, const int32_t *child_visits, int64_t b, int64_t k, int64_t at,
                            int64_t depth, double *visits) {
    int64_t extra = 0;
    for (int64_t a = 0; a < s->num_actions; a++) visits[a] = child_visits[a];
    if ((s->rule != UCB && s->rule != GUMBEL) || depth >= s->num_depths) return 0;
    for (int64_t earlier = 0; earlier < k; earlier++) {
        const int64_t *path = path_of(s, b, earlier, depth);
        if (path[0] == at) { visits[path[1]] += 1.0; extra++; }
    }
    return extra;
}

static int64_t choose(const Search *s, int64_t step, int64_t k, int64_t b, int64_t at, const int32_t *ints) {
    int64_t A = s->num_actions, path = (step * s->num_paths + k) * s->num_trees + b;
    const double *floats = floats_of(s, b, at);
    double *visits = s->scratch + 2 * A;
    int64_t extra = count_visits(s, ints + CHILD + A, b, k, at, ints[DEPTH], visits);
    double span = s->bounds[2 * b + 1] - s->bounds[2 * b];
    Node n = {A, ints + CHILD, ints + CHILD + A, floats + PRIOR, floats + PRIOR + A, floats + PRIOR + 2 * A, visits,
              ints[VISITS] + (int32_t)extra, floats[VALUE_SUM] / ints[VISITS], s->bounds[2 * b],
              larger(span, s->min_max_delta), s->two_players && ints[TO_PLAY] == 1, s->scratch, s->scratch + A};
    if (s->rule == GUMBEL) {
        n.own_value = floats[VALUE];
        completed_values(s, &n);
        if (at) return gumbel_inside(&n);
        return gumbel_root(&n, s->gumbel + b * A,
                           s->considered[s->num_considered[b] * s->num_simulations + n.own_visits - 1]);
    }
    value_scores(&n, s->unexpanded, s->unexpanded_value);
    double factor = s->factors[n.own_visits];
    if (s->rule == UCB) return best_upper_bound(&n, factor, s->ties + path * A);
    return draw_from_policy(s, &n, factor, uniform(s->seeds[path], ints[DEPTH]));
}

/* `count`: number of paths in this step; `first`: number of the first new node; `places` [3, rows, B]: inputs of the
   model (rows of the parent nodes, actions, rows of the new nodes). */
void alfx_select(const Search *s, int64_t step, int64_t count, int64_t first, int64_t *places) {
    int64_t B = s->num_trees, K = s->num_paths, A = s->num_actions, rows = s->expand_all ? A : count;
    for (int64_t b = 0; b < B; b++)
        for (int64_t k = 0; k < count; k++) {
            int64_t at = 0, choice = 0, revisited = -1;
            if (count > 1)
                for (int64_t d = 0; d < s->num_depths; d++) path_of(s, b, k, d)[0] = -1;
            for (;;) {
                const int32_t *ints = ints_of(s, b, at);
                if (ints[OVER] || ints[DEPTH] >= s->depth_limit) { revisited = at; break; }
                if (s->expand_all && !ints[CHILDREN]) break;
                choice = choose(s, step, k, b, at, ints);
                if (count > 1 && ints[DEPTH] < s->num_depths)
                    memcpy(path_of(s, b, k, ints[DEPTH]), (int64_t[]){at, choice}, 2 * sizeof(int64_t));
                if (!ints[CHILD + choice]) break;
                at = ints[CHILD + choice];
            }
            s->chosen[k * B + b] = at;
            s->chosen[(K + k) * B + b] = choice;
            s->chosen[(2 * K + k) * B + b] = revisited;
            for (int64_t row = s->expand_all ? 0 : k; row < (s->expand_all ? A : k + 1); row++) {
                places[row * B + b] = at * B + b;
                places[(rows + row) * B + b] = s->expand_all ? row : choice;
                places[(2 * rows + row) * B + b] = (first + row) * B + b;
            }
        }
}

static void add_node(Search *s, int64_t b, int64_t parent, int64_t action, const double *output, int64_t node) {
    int64_t A = s->num_actions;
    int32_t *above = ints_of(s, b, parent), *ints = ints_of(s, b, node);
    double *floats = floats_of(s, b, node), highest = 0.0;
    for (int64_t a = 0; a < A; a++) highest = larger(highest, output[3 + a]);
    memset(ints, 0, (CHILD + 2 * A) * sizeof *ints);
    memset(floats, 0, (PRIOR + 3 * A) * sizeof *floats);
    ints[PARENT] = (int32_t)parent;
    ints[ACTION] = (int32_t)action;
    ints[DEPTH] = above[DEPTH] + 1;
    ints[TO_PLAY] = s->two_players ? 1 - above[TO_PLAY] : 0;
    ints[OVER] = output[2] != 0 || highest <= 0; /* a node without actions is terminal */
    floats[VALUE] = output[0];
    floats[REWARD] = output[1];
    memcpy(floats + PRIOR, output + 3, A * sizeof *floats);
    if (s->rule == GUMBEL) memcpy(floats + PRIOR + 2 * A, output + 3 + A, A * sizeof *floats);
    above[CHILD + action] = (int32_t)node;
    above[CHILDREN]++;
}

/* Count a visit that returned `value`; return reward + discount * `value` for the parent. */
static double observe(Search *s, int64_t b, int64_t node, double value) {
    int32_t *ints = ints_of(s, b, node);
    double *floats = floats_of(s, b, node);
    floats[VALUE_SUM] += value;
    ints[VISITS]++;
    double mean = floats[VALUE_SUM] / ints[VISITS];
    if (ints[PARENT] >= 0) {
        mean = floats[REWARD] + s->discount * mean;
        floats_of(s, b, ints[PARENT])[PRIOR + s->num_actions + ints[ACTION]] = mean;
        ints_of(s, b, ints[PARENT])[CHILD + s->num_actions + ints[ACTION]] = ints[VISITS];
    }
    if (!s->fixed_bounds) {
        s->bounds[2 * b] = smaller(s->bounds[2 * b], mean);
        s->bounds[2 * b + 1] = larger(s->bounds[2 * b + 1], mean);
    }
    return floats[REWARD] + s->discount * value;
}

/* Expand all actions of a leaf; return its value, averaged over them. */
static double expand_leaf(Search *s, int64_t b, int64_t leaf, const double *outputs, int64_t width, int64_t first) {
    int64_t A = s->num_actions;
    double value = 0.0, mass = 0.0, *prior = floats_of(s, b, leaf) + PRIOR;
    for (int64_t a = 0; a < A; a++)
        if (prior[a] > 0) {
            const double *output = outputs + (a * s->num_trees + b) * width;
            add_node(s, b, leaf, a, output, first + a);
            observe(s, b, first + a, output[0]);
            mass += prior[a];
            value += prior[a] * prior[A + a]; /* prior[A + a] is the value written by observe */
        }
    return value / mass;
}

/* Return whether value, reward and priors are finite; the priors of terminal nodes are ignored. */
static int is_finite(const double *output, int64_t A) {
    int64_t count = output[2] != 0 ? 3 : 3 + A;
    for (int64_t i = 0; i < count; i++)
        if (!isfinite(output[i])) return 0;
    return 1;
}

/* Return the first tree with values that are not finite, or -1. `rows`: rows of the outputs [rows, B, 3 + A (+ A)]. */
int64_t alfx_expand_backup(Search *s, const double *outputs, int64_t rows, int64_t first, int64_t expand_all) {
    int64_t A = s->num_actions, B = s->num_trees, K = expand_all ? 1 : rows;
    int64_t width = s->rule == GUMBEL ? 3 + 2 * A : 3 + A, bad = B;
    for (int64_t i = 0; i < rows * B; i++)
        if (!is_finite(outputs + i * width, A) && i % B < bad) bad = i % B;
    if (bad < B) return bad;
    for (int64_t b = 0; b < B; b++)
        for (int64_t k = 0; k < K; k++) {
            int64_t node = s->chosen[k * B + b], action = s->chosen[(s->num_paths + k) * B + b];
            int64_t revisited = s->chosen[(2 * s->num_paths + k) * B + b];
            double value;
            if (revisited >= 0) value = floats_of(s, b, revisited)[VALUE];
            else if (expand_all) value = expand_leaf(s, b, node, outputs, width, first);
            else {
                if (!ints_of(s, b, node)[CHILD + action]) /* else an earlier path of this step has added it */
                    add_node(s, b, node, action, outputs + (k * B + b) * width, first + k);
                node = ints_of(s, b, node)[CHILD + action];
                value = floats_of(s, b, node)[VALUE];
            }
            for (; node >= 0; node = ints_of(s, b, node)[PARENT]) value = observe(s, b, node, value);
        }
    return -1;
}
