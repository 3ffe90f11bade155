// The tree of the drafter `block`: the most probable node next, as long as it is worth its row (speculative/drafters/block.py).
#include <algorithm>
#include <cmath>
#include <queue>

#include "block_draft.h"
#include "products.h"

namespace specpress {

// The tokens whose logits lie at most so many eighths of a nat below a place's largest one as it takes to have `count` of
// them (_considered in runtime/speculative/drafters/block.py). names: which token each number is of, in order; null: of the
// token at its place.
void BlockDraft::consider(const float* base, int64_t size, const int64_t* names, int64_t count, Considered& found) {
    constexpr int LAST = 255;
    found.tokens.clear(), found.logits.clear();
    const int64_t best = path_.largest(base, size, size);
    if (best < 0) return;  // no numbers: there are no children
    const float highest = base[best];
    steps_.resize(static_cast<size_t>(size));
    int64_t counts[LAST + 1] = {};
    for (int64_t i = 0; i < size; i++) {
        const float below = (highest - base[i]) * 8.0f;
        steps_[i] = static_cast<uint8_t>(below < LAST ? static_cast<int>(below) : LAST);
        counts[steps_[i]]++;
    }
    int last = 0;
    for (int64_t there = counts[0]; there < count && last < LAST; there += counts[last]) last++;
    for (int64_t i = 0; i < size; i++) {
        if (steps_[i] > last) continue;
        found.tokens.push_back(names ? names[i] : i);
        found.logits.push_back(base[i]);
    }
}

// The children that follow from a memory, of the tokens considered, with their probabilities among these.
void BlockDraft::judge(const float* memory, const Considered& found, int64_t branch, Children& out) {
    const int64_t count = static_cast<int64_t>(found.tokens.size());
    specpress::grow(scores_, count + LINE);
    float highest;
    const float total = path_.weigh({net_.adds, memory, found.logits.data(), found.tokens.data(), count, net_.rank, scores_.data(), &highest});
    out.tokens.clear(), out.shares.clear();
    for (int64_t n = 0; n < std::min(branch, count); n++) {
        const int64_t best = std::max_element(scores_.begin(), scores_.begin() + count) - scores_.begin();
        out.shares.push_back(std::exp(static_cast<double>(scores_[best]) - highest) / total);
        out.tokens.push_back(found.tokens[best]);
        scores_[best] = -INFINITY;
    }
}

// How probable the first child is to be right; the others share what is left of that.
double BlockDraft::confidence(const float* row, const float* memory, Children& of) const {
    const int64_t rank = net_.rank, hidden = net_.hidden;
    const float* sure = net_.sure;
    const double best = of.shares[0];
    const double told = path_.dot(row, sure, hidden) + path_.dot(memory, sure + hidden, rank) + sure[hidden + rank] * std::log(best) + sure[hidden + rank + 1];
    const double right = 1.0 / (1.0 + std::exp(-told)), rest = (1.0 - right) / std::max(1e-9, 1.0 - best);
    for (double& share : of.shares) share *= rest;
    return of.shares[0] = right;
}

// The memory behind a token at a depth, and the children that follow from it.
void BlockDraft::expand(const BlockPlaces& places, int64_t depth, int64_t token, const float* before, const BlockGrowth& growth,
                        float* after, Children& out) {
    const int64_t rank = net_.rank;
    const float *base = places.base + depth * net_.logits, *row = places.rows + depth * net_.hidden;
    path_.block_step({net_.of_token + token * 2 * rank, places.of_row + depth * 2 * rank, net_.gates, net_.of_memory, before, rank,
                      gates_.data(), after});
    Considered& found = considered_[depth];
    if (found.tokens.empty()) consider(base, net_.logits, net_.frequent, growth.considered, found);
    judge(after, found, growth.branch, out);
    if (confidence(row, after, out) >= growth.unsure || depth || !net_.frequent) return;
    // The token may be a rare one, of which the confidence does not know. Places behind the first are left to the short
    // head: where that is unsure no token is worth a row.
    specpress::grow(whole_, net_.vocabulary);
    product(net_.whole, row, 1, whole_.data());
    consider(whole_.data(), net_.vocabulary, nullptr, growth.considered, found);
    judge(after, found, growth.branch, out);
}

void BlockDraft::grow(const BlockText& text, int64_t length, const BlockGrowth& growth, const BlockPlaces& places, const BlockTrees& trees,
                      int64_t request) {
    // The most probable first, of equals the one that was offered earlier.
    struct Offer {
        double joint;
        int64_t parent, rank;
        bool operator<(const Offer& other) const {
            if (joint != other.joint) return joint < other.joint;
            return parent != other.parent ? parent > other.parent : rank > other.rank;
        }
    };
    const int64_t rank = net_.rank;
    specpress::grow(memories_, (text.budget + 1) * rank), specpress::grow(gates_, 2 * rank);
    children_.resize(static_cast<size_t>(text.budget + 1)), considered_.resize(static_cast<size_t>(net_.length));
    for (auto& found : considered_) found.tokens.clear();
    nodes_.clear();
    std::priority_queue<Offer> offers;
    // Node n has the memory and the children n + 1.
    auto memory = [&](int64_t node) { return memories_.data() + (node + 1) * rank; };
    auto joint = [&](int64_t node) { return node < 0 ? 1.0 : nodes_[node].joint; };
    auto offer = [&](int64_t node, int64_t number) {
        const Children& found = children_[node + 1];
        if (number < static_cast<int64_t>(found.tokens.size())) offers.push({joint(node) * found.shares[number], node, number});
    };
    auto open = [&](int64_t node, int64_t depth, int64_t token, const float* before) {
        if (depth >= length) return;
        expand(places, depth, token, before, growth, memory(node), children_[node + 1]);
        offer(node, 0);
    };
    open(-1, 0, text.token, nullptr);
    while (!offers.empty() && static_cast<int64_t>(nodes_.size()) < text.budget && offers.top().joint >= growth.worth) {
        const Offer best = offers.top();
        offers.pop();
        const int64_t depth = best.parent < 0 ? 1 : nodes_[best.parent].depth + 1, number = static_cast<int64_t>(nodes_.size());
        nodes_.push_back({children_[best.parent + 1].tokens[best.rank], best.parent, depth, best.joint});
        if (number + 1 == text.budget) break;  // nobody asks what would follow
        offer(best.parent, best.rank + 1);
        open(number, depth, nodes_.back().token, memory(best.parent));
    }
    for (size_t i = 0; i < nodes_.size(); i++) {
        trees.tokens[request * trees.stride + static_cast<int64_t>(i)] = nodes_[i].token;
        trees.parents[request * trees.stride + static_cast<int64_t>(i)] = nodes_[i].parent;
    }
    trees.counts[request] = static_cast<int64_t>(nodes_.size());
}

}  // namespace specpress
