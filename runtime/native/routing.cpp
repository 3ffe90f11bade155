// Which experts a row goes to, and its shares of them: each operation is kernels/routing.py's, in its order.
#include "kernels.h"
#include "vec.h"

namespace SPECPRESS_PATH {

using specpress::Routing;

void sigmoid(float* x, int64_t size);

constexpr int64_t MOST = 1024;  // experts

// Σ of `size` values, halving; the values are lost.
static float tree_sum(float* x, int64_t size) {
    int64_t width = 1;
    while (width < size) width *= 2;
    while (width > 1) {
        width /= 2;
        for (int64_t i = 0; i < width && i + width < size; i++) x[i] = x[i] + x[i + width];
        size = width < size ? width : size;
    }
    return x[0];
}

// The first of the largest that are not taken. NaNs compare with nothing: the first that is left then.
static int64_t best_of(const float* x, int64_t size, const bool* taken) {
    int64_t best = -1;
    for (int64_t i = 0; i < size; i++)
        if (!taken[i] && (best < 0 || x[i] > x[best])) best = i;
    return best;
}

// e^(x − top).
static void weigh(const float* x, int64_t size, float top, float* out) {
    for (int64_t e = 0; e < size; e += LANES) {
        float lanes[LANES] = {};
        const int64_t here = size - e < LANES ? size - e : LANES;
        for (int64_t i = 0; i < here; i++) lanes[i] = x[e + i] - top;
        store(lanes, exp(load(lanes)));
        for (int64_t i = 0; i < here; i++) out[e + i] = lanes[i];
    }
}

static void softmax(const float* scores, int64_t size, float* odds) {
    float highest = scores[0], halves[MOST];
    for (int64_t e = 1; e < size; e++) highest = scores[e] > highest ? scores[e] : highest;
    weigh(scores, size, highest, odds);
    std::memcpy(halves, odds, static_cast<size_t>(size) * 4);
    const float total = tree_sum(halves, size);
    for (int64_t e = 0; e < size; e++) odds[e] = odds[e] / total;
}

// Experts of groups that are not chosen from are never the best.
static void leave_out(const Routing& r, float* rank) {
    const int64_t size = r.experts / r.groups;
    float sums[MOST], best[MOST];
    bool taken[MOST] = {}, kept[MOST] = {};
    for (int64_t g = 0; g < r.groups; g++) {
        const float* part = rank + g * size;
        std::memset(taken, 0, static_cast<size_t>(size));
        for (int64_t i = 0; i < r.group_best; i++) {
            const int64_t at = best_of(part, size, taken);
            best[i] = part[at], taken[at] = true;
        }
        sums[g] = tree_sum(best, r.group_best);
    }
    for (int64_t i = 0; i < r.groups_chosen; i++) kept[best_of(sums, r.groups, kept)] = true;
    for (int64_t e = 0; e < r.experts; e++)
        if (!kept[e / size]) rank[e] = -INFINITY;
}

// The chosen in order of their rank, and each one's share.
static void mix_sparsely(const float* scores, const Routing& r, int64_t* which, float* share) {
    float left[MOST], near[MOST];
    bool taken[MOST] = {};
    std::memcpy(left, scores, static_cast<size_t>(r.experts) * 4);
    for (int64_t i = 0; i < r.chosen; i++) {
        const int64_t best = best_of(left, r.experts, taken);
        const float top = left[best];
        for (int64_t e = 0; e < r.experts; e++) {
            const float size = std::fabs(scores[e]);
            near[e] = (top - left[e]) / (size > top ? size : top) > r.tolerance ? -INFINITY : left[e];
        }
        weigh(near, r.experts, top, near);
        const float own = near[best];
        share[i] = own / tree_sum(near, r.experts);
        which[i] = best, taken[best] = true, left[best] = -INFINITY;
    }
}

void choose(float* scores, int64_t rows, const Routing& r, int64_t* which) {
    const int64_t experts = r.experts, chosen = r.chosen;
    float odds[MOST], rank[MOST], share[MOST];
    bool taken[MOST];
    for (int64_t row = 0; row < rows; row++, scores += experts, which += chosen) {
        if (r.scoring == specpress::SPARSE_MIXER) {
            mix_sparsely(scores, r, which, share);
        } else {
            const bool alone = r.scoring == specpress::SIGMOID;
            if (alone) {
                std::memcpy(odds, scores, static_cast<size_t>(experts) * 4);
                sigmoid(odds, experts);
            } else {
                softmax(scores, experts, odds);
            }
            for (int64_t e = 0; e < experts; e++)
                rank[e] = r.correction ? odds[e] + r.correction[e] : alone ? scores[e] : odds[e], taken[e] = false;
            if (r.groups > 1) leave_out(r, rank);
            for (int64_t i = 0; i < chosen; i++) {
                const int64_t best = best_of(rank, experts, taken);
                which[i] = best, share[i] = odds[best], taken[best] = true;
            }
        }
        for (int64_t e = 0; e < experts; e++) scores[e] = 0.0f;
        if (r.renormalize) {
            std::memcpy(rank, share, static_cast<size_t>(chosen) * 4);
            const float of = tree_sum(rank, chosen);
            for (int64_t i = 0; i < chosen; i++) share[i] = share[i] / of;
        }
        for (int64_t i = 0; i < chosen; i++) {
            const float scaled = r.scale != 1.0f ? share[i] * r.scale : share[i];
            scores[which[i]] = r.expert_scale ? scaled * r.expert_scale[which[i]] : scaled;
        }
    }
}

}  // namespace SPECPRESS_PATH
