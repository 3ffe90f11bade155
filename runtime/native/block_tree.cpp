// The tree of the drafter `block`: the most probable node next, as long as it is worth its row (speculative/drafters/block.py).
#include <algorithm>
#include <cmath>
#include <queue>

#include "block_draft.h"
#include "products.h"

namespace specpress {

// The tokens with the `count` largest of a place's logits, the largest first, of equals the lower token. names: which token
// each number is of, in order; null: of the token at its place.
void BlockDraft::consider(const float* base, int64_t size, const int64_t* names, int64_t count, Considered& found) {
    const int64_t parts = (size + 63) / 64;
    std::vector<int64_t>& at = order_;
    specpress::grow(highest_, 2 * parts);
    path_.maxima(base, size, highest_.data());
    // So many parts have a number that is at least this large: no smaller one is among the largest.
    float least = -INFINITY;
    if (parts > count) {
        std::copy(highest_.begin(), highest_.begin() + parts, highest_.begin() + parts);
        std::nth_element(highest_.begin() + parts, highest_.begin() + parts + count - 1, highest_.begin() + 2 * parts, std::greater<float>());
        least = highest_[parts + count - 1];
    }
    at.clear();
    for (int64_t part = 0; part < parts; part++) {
        if (highest_[part] < least) continue;
        for (int64_t i = part * 64; i < std::min(part * 64 + 64, size); i++)
            if (base[i] >= least) at.push_back(i);
    }
    const int64_t kept = std::min<int64_t>(count, static_cast<int64_t>(at.size()));
    std::partial_sort(at.begin(), at.begin() + kept, at.end(),
                      [&](int64_t a, int64_t b) { return base[a] > base[b] || (base[a] == base[b] && a < b); });
    at.resize(static_cast<size_t>(kept));
    found.tokens.clear(), found.logits.clear();
    for (const int64_t i : at) {
        found.tokens.push_back(names ? names[i] : i);
        found.logits.push_back(base[i]);
    }
}

// The children that follow from a memory, of the tokens considered, with their probabilities among these.
void BlockDraft::judge(const float* memory, const Considered& found, int64_t branch, Children& out) const {
    std::vector<std::pair<double, int64_t>> scored(found.tokens.size());
    double highest = -INFINITY;
    for (size_t i = 0; i < scored.size(); i++) {
        scored[i] = {found.logits[i] + path_.dot(net_.adds + found.tokens[i] * net_.rank, memory, net_.rank), found.tokens[i]};
        highest = std::max(highest, scored[i].first);
    }
    double total = 0.0;
    for (const auto& one : scored) total += std::exp(one.first - highest);
    std::stable_sort(scored.begin(), scored.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    scored.resize(std::min<size_t>(scored.size(), static_cast<size_t>(branch)));
    out.tokens.clear(), out.shares.clear();
    for (const auto& one : scored) {
        out.shares.push_back(std::exp(one.first - highest) / total);
        out.tokens.push_back(one.second);
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
