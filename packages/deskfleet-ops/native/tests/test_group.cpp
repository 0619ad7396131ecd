// Collectives of forked processes, so that sanitizers see them: sizes around a slot's, and a process that ends. What comes
// of random ones, the Python tests know.
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vector>

#include "deskfleet_ops.h"

namespace {

constexpr int64_t kSize = 4;
constexpr int64_t kSlot = DF_GROUP_SLOT_BYTES;

void check(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "group_test: %s\n", what);
  _exit(1);
}

void exchange(int64_t group, int64_t rank, int64_t size, int64_t count) {
  std::vector<double> numbers(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) numbers[static_cast<size_t>(i)] = static_cast<double>(rank * count + i);
  check(df_group_all_reduce(group, numbers.data(), count, DF_F64) == 0, "all_reduce fails");
  for (int64_t i = 0; i < count; ++i) {
    const auto sum = static_cast<double>(size * i + count * size * (size - 1) / 2);
    check(numbers[static_cast<size_t>(i)] == sum, "a sum is wrong");
  }
  std::vector<char> own(static_cast<size_t>(count), static_cast<char>(rank)), all(static_cast<size_t>(count * size));
  check(df_group_all_gather(group, own.data(), count, all.data()) == 0, "all_gather fails");
  for (int64_t i = 0; i < count * size; ++i) {
    check(all[static_cast<size_t>(i)] == static_cast<char>(i / count), "a gathered byte is wrong");
  }
  std::vector<char> told(static_cast<size_t>(count), static_cast<char>(rank == 0 ? 7 : 0));
  check(df_group_broadcast(group, told.data(), count) == 0, "broadcast fails");
  for (const char byte : told) check(byte == 7, "a byte that was told is wrong");
}

int run(int file, int64_t rank) {
  const int64_t group = df_group_open(file, rank, kSize, kSize, rank % 2);
  check(group > 0, "a group cannot be opened");
  check(df_group_all_gather(group, nullptr, 0, nullptr) == 0, "the processes do not meet");
  const int64_t pair = df_group_open(file, rank, kSize, 2, 0);
  check(pair > 0, "a part cannot be opened");
  for (const int64_t bytes : {int64_t{8}, kSlot - 8, kSlot, 3 * kSlot + 8}) {
    exchange(group, rank, kSize, bytes / 8);
    exchange(pair, rank % 2, 2, bytes);
  }
  std::vector<char> slot(static_cast<size_t>(kSlot));
  char word[] = "word";
  if (rank == 0) {
    check(df_group_broadcast(group, word, 4) == 0, "a word cannot be told");
  } else {
    check(df_group_receive(group, slot.data()) == 4 && slot[3] == 'd', "a word was not understood");
  }
  if (rank == 2) _exit(0);  // without a word
  float one = 1;
  // Or that of another, which has noticed it and gone.
  const int64_t lost = -1 - df_group_all_reduce(group, &one, 1, DF_F32);
  check(lost >= 0 && lost < kSize && lost != rank, "the end of process 2 was not noticed");
  df_group_close(pair);
  df_group_close(group);
  return 0;
}

}  // namespace

int main() {
  const int file = memfd_create("group_test", 0);
  check(file >= 0, "no memory without a name");
  for (int64_t rank = 0; rank < kSize; ++rank) {
    const pid_t child = fork();
    check(child >= 0, "no process");
    if (child == 0) _exit(run(file, rank));
  }
  bool is_well = true;
  for (int64_t rank = 0; rank < kSize; ++rank) {
    int status = 0;
    is_well = wait(&status) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0 && is_well;
  }
  puts(is_well ? "group: well" : "group: failed");
  return is_well ? 0 : 1;
}
