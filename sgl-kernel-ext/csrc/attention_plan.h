// How one call of ragged_attention is cut into work: lists, units that share keys, items.
// Nothing here can change a bit of the result.
#pragma once
#include <atomic>
#include <vector>

#include "attention_few.h"
#include "attention_split.h"

namespace sgl_ext {

// Queries (row and head) of a unit, over all of its KV heads.
constexpr int kUnitQueries = 96;
// Bytes of a unit's keys and values of a split: these stay in a level 2 cache.
constexpr int64_t kUnitBytes = 512 * 1024;
// Work items a thread should get at least, so that one long list cannot hold up the others.
constexpr int kItemsPerThread = 8;
// Reading or packing a key costs about as much as attending to it with this many queries.
constexpr int64_t kReadCost = 8, kPackCost = 32;

struct Group {
  int64_t first_row;
  int rows;
};

// The keys of one group for one or all KV heads, in order: view, then tail.
struct KvList {
  const int32_t* view;
  int view_len;
  int view_pool;  // index into Problem::pools; the tail is in pool 0
  const int32_t* tail;
  int tail_len;

  int len() const { return view_len + tail_len; }

  // Of `count` entries from `begin` on, how many come from the view.
  int in_view(int begin, int count) const { return std::clamp(view_len - begin, 0, count); }

  void copy(int begin, int count, int32_t* slots) const {
    const int from_view = in_view(begin, count);
    std::copy_n(view + begin, from_view, slots);
    std::copy_n(tail + (begin + from_view - view_len), count - from_view, slots + from_view);
  }
};

// A tile of queries of one group. KV heads that read the same list are attended to together while
// that is cheap: the rows of a slot are neighbours in memory, and DRAM delivers neighbours.
// Query i of a KV head is row i / gqa of the group and head i % gqa of the KV head.
struct Unit {
  Group group;
  KvList list;
  int first_head, heads;
  int first_query, queries;  // of each KV head
  int splits;
  int items_left;
  float* partials;  // [splits][heads][queries] states, or null when one item walks every split

  int64_t states() const { return int64_t{heads} * queries; }
  int64_t cost() const {
    return list.len() * (states() + heads * (queries <= kFewQueries ? kReadCost : kPackCost));
  }
};

struct Item {
  int unit, split_begin, split_end;
};

struct Problem {
  const void* q;
  int64_t q_row_stride, q_head_stride;
  std::vector<KvPools> pools;  // the main one, then those that hold views only
  void* out;
  int64_t out_row_stride, out_head_stride;
  float* lse;
  int64_t lse_row_stride;
  int kv_heads, gqa, head_dim;
  float scale_log2;
  std::vector<Unit> units;
  std::vector<Item> items;
  std::atomic<int> bad_pool{-1};  // a pool that a listed slot is outside of

  int state_size() const { return kStateHeader + round_up(head_dim, kLanes); }

  // Most KV heads of a unit; `pair` elements make a packed word of 4 bytes.
  int head_limit(int pair) const {
    const int64_t bytes = int64_t{kSplit} * 2 * head_dim * 4 / pair;
    return std::clamp<int64_t>(kUnitBytes / bytes, 1, std::min(kUnitHeads, kv_heads));
  }

  // Keys that query i of a unit sees.
  int visible(const Unit& unit, int i) const {
    return unit.list.len() - (unit.group.rows - 1 - (unit.first_query + i) / gqa);
  }
  int64_t row(const Unit& unit, int i) const {
    return unit.group.first_row + (unit.first_query + i) / gqa;
  }
  int64_t head(const Unit& unit, int h, int i) const {
    return int64_t{unit.first_head + h} * gqa + (unit.first_query + i) % gqa;
  }

  // Adds the units of `heads` KV heads that read one list.
  void add_units(const Group& group, const KvList& list, int first_head, int heads, int limit) {
    const int queries = group.rows * gqa;
    const int tile = std::min(kUnitQueries, queries);
    const int parts = ceil_div(heads, std::clamp(kUnitQueries / tile, 1, limit));
    for (int part = 0; part < parts; ++part) {
      const int begin = heads * part / parts, end = heads * (part + 1) / parts;
      // Later tiles see more keys: longest first balances the threads.
      for (int first = (queries - 1) / tile * tile; first >= 0; first -= tile) {
        Unit unit{group, list, first_head + begin, end - begin, first,
                  std::min(tile, queries - first), 0, 0, nullptr};
        unit.splits = ceil_div(visible(unit, unit.queries - 1), kSplit);
        units.push_back(unit);
      }
    }
  }

  // Cuts units into items of at most a fair share of the work.
  void plan_items(int threads) {
    static thread_local std::vector<float> partials;
    int64_t total = 0, floats = 0;
    for (const Unit& u : units) total += u.cost();
    const int64_t share = threads == 1 ? total : total / (threads * kItemsPerThread);
    for (size_t i = 0; i < units.size(); ++i) {
      Unit& u = units[i];
      const int per_item = std::clamp<int64_t>(u.splits * share / u.cost(), 1, u.splits);
      u.items_left = ceil_div(u.splits, per_item);
      if (u.items_left > 1) floats += u.splits * u.states() * state_size();
      for (int s = 0; s < u.splits; s += per_item) {
        items.push_back({static_cast<int>(i), s, std::min(u.splits, s + per_item)});
      }
    }
    if (partials.size() < static_cast<size_t>(floats)) partials.resize(floats);
    float* next = partials.data();
    for (Unit& u : units) {
      if (u.items_left == 1) continue;
      u.partials = next;
      next += u.splits * u.states() * state_size();
    }
  }
};

}  // namespace sgl_ext
