// Walks every block's share of many plans, and says where one is wrong. No GPU:
// the plan and what the kernel reads off it are the same code.
#define __host__
#define __device__
#include <cstdio>
#include <map>
#include <set>
#include <vector>

#include "plan.h"

using namespace glm53;

static int check(int tokens, int width, int expected, int splits, int keys,
                 int sm_count) {
  const Plan plan = make_plan(tokens, width, expected, splits, keys, sm_count);
  const Schedule &s = plan.schedule;
  std::map<int, std::vector<std::pair<int, int>>>
      ranges; // of a token: begin, end
  std::map<int, std::set<int>> slots;
  std::set<int> all_slots;
  int most = 0, bad = 0;
  if (plan.blocks < 1 || plan.blocks > sm_count)
    ++bad;
  for (int block = 0; block < plan.blocks; ++block) {
    int steps = 0;
    for (Position at = first_position(s, block); at < s.whole_tokens * s.splits;
         at = next_position(s, block, plan.blocks, at)) {
      const Range range = range_at(s, block, at);
      if (range.token < 0 || range.token >= tokens || ++steps > tokens * 64 + 2)
        return 1000;
      ranges[range.token].push_back({range.begin, range.end});
      const int slot = slot_at(s, block, at);
      if (slots_of(s, range.token).parts == 1)
        continue;
      slots[range.token].insert(slot);
      if (!all_slots.insert(slot).second)
        ++bad; // two parts in one slot
      if (slot < 0 || slot >= slot_count(tokens, splits, sm_count))
        ++bad;
    }
  }
  for (int token = 0; token < tokens; ++token) {
    auto &found = ranges[token];
    std::sort(found.begin(), found.end());
    int next = 0;
    for (const auto &[begin, end] : found) {
      if (begin != next || end < begin)
        ++bad; // a gap, or tiles twice
      next = end;
    }
    if (next != s.all_tiles)
      ++bad;
    const Slots told = slots_of(s, token);
    most = std::max(most, told.parts);
    if (told.parts != static_cast<int>(found.size()))
      ++bad;
    if (token < first_split_token(s) && told.parts != 1)
      ++bad;
    std::set<int> expected_slots;
    for (int part = 0; told.parts > 1 && part < told.parts; ++part)
      expected_slots.insert(told.at(part));
    if (expected_slots != slots[token])
      ++bad;
  }
  if (most > plan.parts)
    ++bad;
  if (splits > 0 && most != splits)
    ++bad;
  return bad;
}

int main() {
  int plans = 0, wrong = 0;
  for (const int sm_count : {1, 7, 48, 132})
    for (const int tokens : {1, 2, 5, 8, 47, 64, 100, 131, 133, 200})
      for (const int width : {0, 33, 100, 2051, 2176})
        for (const int expected : {0, 2051})
          for (const int splits : {0, 1, 3, 64})
            for (const int keys : {32, 64}) {
              const int bad =
                  check(tokens, width, expected, splits, keys, sm_count);
              ++plans;
              if (!bad)
                continue;
              if (++wrong < 10)
                std::printf("wrong: %d tokens, %d wide, %d expected, %d "
                            "splits, %d keys, %d sm\n",
                            tokens, width, expected, splits, keys, sm_count);
            }
  std::printf("%d plans, %d wrong\n", plans, wrong);
  return wrong != 0;
}
