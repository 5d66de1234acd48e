// A small coverage-guided fuzzer with libFuzzer's entry point, for compilers that have none.
//
//   PROGRAM INPUTS CORPUS [FINDINGS]
//
// runs each file of the folder CORPUS, then changed copies of them, INPUTS in all: a number, or
// seconds as in 600s. What reaches a new edge is changed again, where the code was built with
// -fsanitize-coverage=trace-pc. An input that fails is written to the folder FINDINGS (default: the
// working folder).

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern "C" [[gnu::weak]] void __sanitizer_set_death_callback(void (*callback)());

namespace {

using Input = std::vector<uint8_t>;

constexpr size_t kMostBytes = 512;
constexpr size_t kEdges = 1U << 16;

std::array<bool, kEdges> reached;
bool reached_more = false;
size_t edges = 0;
uintptr_t previous = 0;

Input running;
std::filesystem::path findings = ".";

void save() {
  const auto name =
      "finding-" + std::to_string(std::hash<std::string_view>{}(std::string_view(
                       reinterpret_cast<const char*>(running.data()), running.size())));
  std::ofstream(findings / name, std::ios::binary)
      .write(reinterpret_cast<const char*>(running.data()),
             static_cast<std::streamsize>(running.size()));
  std::cerr << "the input is in " << (findings / name).string() << '\n';
}

// Returns whether it reached an edge that no input reached before.
bool run(const Input& input) {
  running = input;
  reached_more = false;
  previous = 0;
  LLVMFuzzerTestOneInput(input.data(), input.size());
  return reached_more;
}

size_t below(std::mt19937_64& random, size_t bound) { return random() % bound; }

Input changed(std::mt19937_64& random, const std::vector<Input>& corpus) {
  Input input = corpus[below(random, corpus.size())];
  for (size_t times = 1 + below(random, 8); times > 0; --times) {
    const size_t at = input.empty() ? 0 : below(random, input.size());
    switch (input.empty() ? 1 : below(random, 6)) {
      case 0:
        input[at] = static_cast<uint8_t>(random());
        break;
      case 1:
        input.insert(input.begin() + static_cast<ptrdiff_t>(at), static_cast<uint8_t>(random()));
        break;
      case 2:
        input.erase(input.begin() + static_cast<ptrdiff_t>(at));
        break;
      case 3:
        input[at] ^= static_cast<uint8_t>(1U << below(random, 8));
        break;
      case 4: {  // the start of this one, the end of another
        const Input& other = corpus[below(random, corpus.size())];
        input.resize(at);
        if (!other.empty()) {
          const auto from = other.begin() + static_cast<ptrdiff_t>(below(random, other.size()));
          input.insert(input.end(), from, other.end());
        }
        break;
      }
      default: {  // a part twice
        const Input part(input.begin() + static_cast<ptrdiff_t>(at), input.end());
        input.insert(input.end(), part.begin(), part.end());
        break;
      }
    }
    if (input.size() > kMostBytes) input.resize(kMostBytes);
  }
  return input;
}

}  // namespace

// Called by the code under test at each edge. Addresses are relative to this program.
extern "C" void __sanitizer_cov_trace_pc() {
  const auto here = reinterpret_cast<uintptr_t>(__builtin_return_address(0)) -
                    reinterpret_cast<uintptr_t>(&LLVMFuzzerTestOneInput);
  bool& edge = reached[(here ^ previous) * 0x9E3779B97F4A7C15ULL >> 48U];
  previous = here >> 1U;
  if (edge) return;
  edge = true;
  reached_more = true;
  ++edges;
}

// For the code under test: what is wrong, and the end.
[[noreturn]] void fail(const std::string& problem) {
  std::cerr << problem << '\n';
  save();
  std::exit(1);
}

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: " << argv[0] << " INPUTS|SECONDSs CORPUS [FINDINGS]\n";
    return 2;
  }
  if (argc > 3) findings = argv[3];
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(save);
  std::vector<std::filesystem::path> names;
  for (const auto& file : std::filesystem::directory_iterator(argv[2]))
    names.push_back(file.path());
  std::sort(names.begin(), names.end());
  std::vector<Input> corpus;
  for (const std::filesystem::path& name : names) {
    std::ifstream file(name, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    run(corpus.back());
  }
  if (corpus.empty()) fail("no file in the folder of the corpus");

  std::mt19937_64 random(1);
  uint64_t runs = corpus.size();
  const std::string most = argv[1];
  const uint64_t number = std::stoull(most);
  const auto start = std::chrono::steady_clock::now();
  const auto over = [&] {
    return most.back() == 's'
               ? std::chrono::steady_clock::now() - start >= std::chrono::seconds(number)
               : runs >= number;
  };
  while (!over()) {
    for (int i = 0; i < 64; ++i, ++runs) {
      Input input = changed(random, corpus);
      if (run(input)) corpus.push_back(std::move(input));
    }
  }
  std::cout << runs << " inputs, " << corpus.size() << " kept, " << edges << " edges\n";
}
