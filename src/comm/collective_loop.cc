#include "src/comm/collective_loop.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "spillway/log.h"
#include "src/comm/last_words.h"
#include "src/comm/scalars.h"

namespace spillway {
namespace {

using std::chrono::duration_cast;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr Ticket kOfTransfers = Ticket{1} << 62;
// How long an answer to a last word may take: nothing but a message to a thread that waits for one.
constexpr milliseconds kAnswer{3000};
constexpr milliseconds kOthersMayCome{2000};
constexpr milliseconds kTellOfWork{1000};  // how often, unless somebody's patience ends before
constexpr milliseconds kIdleRest{10};      // how late a rank that has nothing to do hears of another's end
constexpr microseconds kStreamRest{100};   // how late it hears of a GPU's stream, which tells nobody

}  // namespace

CollectiveLoop::CollectiveLoop(Transport& transport, CollectiveQueue& queue, const TransferLimits& limits,
                               double patience_seconds)
    : transport_(transport),
      queue_(queue),
      patience_seconds_(patience_seconds),
      patience_(duration_cast<Clock::duration>(std::chrono::duration<double>(patience_seconds))),
      conversation_(transport, 0),
      transfers_(transport, limits, kOfTransfers),
      hosts_(transport.ranks()),
      words_(transport.ranks()),
      polled_(Clock::now()),
      waited_(transport.ranks()) {
  on_streams_.reserve(kAhead);
}

void CollectiveLoop::run() {
  conversation_.listen();
  while (!queue_.stopping()) {
    queue_.go_round();
    const bool progress = !ended_ && go_on();
    if (!ended_) tell_of_work();
    if (!ended_) watch(progress);
    rest(progress);
  }
  if (!ended_) leave();
  queue_.end();
}

bool CollectiveLoop::go_on() {
  bool progress = announce();
  progress |= take_tickets();
  progress |= !ended_ && agree();
  progress |= !ended_ && move();
  progress |= !ended_ && move_on_streams();
  return progress;
}

bool CollectiveLoop::announce() {
  bool any = false;
  while (announced_ - all_over_ < kAhead && conversation_.may_say()) {
    const Collective* call = queue_.ready(announced_);
    if (call == nullptr) break;
    const bool meets = call->kind == CollectiveKind::kAllReduce || call->kind == CollectiveKind::kBarrier;
    if (meets && !has_come(announced_)) break;
    Word& own = own_[announced_ % kAhead] = word_of(*call, announced_);
    if (call->kind == CollectiveKind::kOpen) {
      std::memcpy(&own.slices_hash, call->data.data(), sizeof(own.slices_hash));
      own.set_text(transport_.host());
    }
    conversation_.say(own);
    ++announced_;
    any = true;
  }
  return any;
}

// Who waits itself does nothing that others wait for.
void CollectiveLoop::tell_of_work() {
  const Clock::time_point now = Clock::now();
  const bool is_due = !told_ || now - *told_ >= std::min<Clock::duration>(kTellOfWork, patience_ / 4);
  if (!is_due || !conversation_.may_say_at_work() || !queue_.take_work() || waits_for_others()) return;
  conversation_.say_at_work();
  told_ = now;
}

bool CollectiveLoop::take_tickets() {
  std::array<Ticket, 32> over;
  const std::size_t count = transport_.poll(over);
  bool news = false;
  for (const Ticket ticket : std::span(over).first(count)) {
    if (ticket < kOfTransfers) {
      news |= conversation_.take(ticket);
    } else {
      transfers_.take(ticket);
      news = true;
    }
  }
  if (ended_) return count > 0;
  if (const std::string why = transport_.failure(); !why.empty()) {
    give_up(Word::Reason::kLibrary, all_over_,
            fmt::format("rank {}: {}: {}", transport_.rank(), transport_.library(), why));
  }
  return news;
}

bool CollectiveLoop::agree() {
  bool any = false;
  while (agreed_ < announced_ && agree_on(agreed_, own_[agreed_ % kAhead])) {
    ++agreed_;
    any = true;
  }
  for (std::uint32_t rank = 0; rank < transport_.ranks() && !ended_; ++rank) {
    const Word* last = rank == transport_.rank() ? nullptr : conversation_.last(rank);
    if (last == nullptr) continue;
    if (last->what == Word::What::kGaveUp) {
      give_up(Word::Reason::kTold, last->failed);
    } else if (last->number < announced_) {
      give_up(Word::Reason::kLeft, last->number,
              fmt::format("rank {} ({}) has left after {} collectives", rank, hosts_[rank],
                          last->number == 0 ? 0 : last->number - 1));
    }
  }
  return any;
}

// Whether all ranks have come to it; gives up where they have not come to the same.
bool CollectiveLoop::agree_on(std::uint64_t number, const Word& own) {
  bool all = true, same = true;
  for (std::uint32_t rank = 0; rank < transport_.ranks(); ++rank) {
    words_[rank] = announced_by(rank, number);
    all &= words_[rank] != nullptr;
    same &= words_[rank] == nullptr || same_collective(own, *words_[rank]);
  }
  if (!same) {
    // The message is better when it has all ranks, which are about to come.
    if (!differ_since_) differ_since_ = Clock::now();
    if (all || Clock::now() - *differ_since_ > kOthersMayCome) give_up(Word::Reason::kDiffer, number);
    return false;
  }
  if (!all) return false;
  const Collective& call = *queue_.ready(number);
  if (call.kind == CollectiveKind::kOpen) {
    for (std::uint32_t rank = 0; rank < transport_.ranks(); ++rank) hosts_[rank] = words_[rank]->text();
  }
  if (call.kind == CollectiveKind::kAllReduce) fold_scalars(words_, call);
  const bool has_data = call.kind != CollectiveKind::kOpen && call.kind != CollectiveKind::kAllReduce &&
                        call.kind != CollectiveKind::kBarrier;
  if (queue_.on_gpu(number)) {
    on_streams_.push_back(number);
    streams_.load()->open_gates(number + 1);
    return true;
  }
  has_data ? transfers_.begin(number, call) : finish(number);
  return true;
}

bool CollectiveLoop::move() {
  bool any = false;
  while (transfers_.start_more()) any = true;
  while (const auto number = transfers_.next_over()) {
    finish(*number);
    any = true;
  }
  return any;
}

bool CollectiveLoop::move_on_streams() {
  StreamMover* const streams = streams_;
  if (streams == nullptr) return false;
  const std::uint64_t before = std::exchange(marks_, streams->marks());
  bool any = before != marks_;
  std::erase_if(on_streams_, [&](std::uint64_t number) {
    if (!streams->is_over(number)) return false;
    finish(number);
    return any = true;
  });
  if (const std::string why = streams->failure(); !why.empty()) {
    give_up(Word::Reason::kLibrary, all_over_, fmt::format("rank {}: {}", transport_.rank(), why));
  }
  return any;
}

bool CollectiveLoop::has_come(std::uint64_t number) const {
  return !queue_.on_gpu(number) || streams_.load()->has_come(number);
}

void CollectiveLoop::finish(std::uint64_t number) {
  over_[number % kAhead] = true;
  // agreed_ counts `number` only after this, so the bound is what was announced.
  while (all_over_ < announced_ && over_[all_over_ % kAhead]) over_[all_over_++ % kAhead] = false;
  queue_.over(number);
}

// Who has not come is waited for as long as it says that it is at work; where all have come, data does not move.
void CollectiveLoop::watch(bool progress) {
  const Clock::time_point now = Clock::now();
  // A process that was stopped for an hour has not waited for an hour: what counts is how often it has looked.
  const Clock::duration since = std::min<Clock::duration>(now - polled_, std::chrono::seconds(1));
  polled_ = now;
  if (progress || !waits_for_others()) return void(std::ranges::fill(waited_, Clock::duration{}));
  bool all_have_come = true, too_long = false;
  for (std::uint32_t rank = 0; rank < waited_.size(); ++rank) {
    waited_[rank] = conversation_.was_at_work(rank) ? Clock::duration{} : waited_[rank] + since;
    const bool has_come = announced_by(rank, all_over_) != nullptr;
    all_have_come &= has_come;
    too_long |= !has_come && waited_[rank] > patience_;
  }
  // This rank never says so to itself.
  too_long |= all_have_come && waited_[transport_.rank()] > patience_;
  if (too_long) give_up(Word::Reason::kNoProgress, all_over_);
}

// Looks again at once while something happens, and less and less often while nothing does: the cores have a model to
// compute. A library may need to be asked for every few KiB of data that it moves, so then rests stay short.
void CollectiveLoop::rest(bool progress) {
  constexpr unsigned kYields = 64;
  if (progress) {
    idle_rounds_ = 0;
  } else if (!waits_for_others() || ended_) {
    const bool stream_comes = streams_ != nullptr && queue_.called() > all_over_;
    queue_.wait(ended_ ? milliseconds(1000) : stream_comes ? kStreamRest : microseconds(kIdleRest));
    idle_rounds_ = 0;
  } else if (++idle_rounds_ < kYields) {
    std::this_thread::yield();
  } else {
    const unsigned longest = transfers_.any() ? 20 : !on_streams_.empty() ? kStreamRest.count() : 1000;
    queue_.wait(microseconds(std::min(10 * (idle_rounds_ - kYields + 1), longest)));
  }
}

void CollectiveLoop::give_up(Word::Reason reason, std::uint64_t failed, const std::string& text) {
  ended_ = true;
  Word own;  // has the name of what failed, as this rank called it, else as another did
  own.is_named = false;
  for (std::uint32_t rank = 0; rank < transport_.ranks(); ++rank) {
    const Word* word = announced_by(rank, failed);
    if (word != nullptr && (rank == transport_.rank() || !own.is_named)) own = *word;
  }
  own.what = Word::What::kGaveUp;
  own.reason = reason;
  own.number = all_over_;
  while (own.number < announced_ && has_come(own.number)) ++own.number;
  own.failed = failed;
  own.at_work = told_ && Clock::now() - *told_ < patience_;
  own.set_text(text);
  say_last(own);
  std::vector<const Word*> last(transport_.ranks());
  for (std::uint32_t rank = 0; rank < transport_.ranks(); ++rank) {
    last[rank] = rank == transport_.rank() ? &own : conversation_.last(rank);
  }
  const Word& cause = cause_of(last);
  for (std::uint32_t rank = 0; rank < transport_.ranks(); ++rank) words_[rank] = announced_by(rank, cause.failed);
  const Error error = error_of({.rank = transport_.rank(),
                                .last_words = last,
                                .announced = words_,
                                .hosts = hosts_,
                                .patience_seconds = patience_seconds_});
  const bool stood = cause.reason == Word::Reason::kNoProgress || cause.reason == Word::Reason::kLibrary;
  const bool moves = !stood || !transfers_.any();
  // Who waits for the queue may free its memory next, and a stream that is let go looks first whether the queue failed.
  lets_go_ = transport_.close(have_parted() && moves ? Parting::kTogether : Parting::kLost);
  queue_.fail(error);
  if (StreamMover* const streams = streams_) streams->abandon();
}

// Gives the others a moment to do the same: what has come from everybody leaves nothing behind.
void CollectiveLoop::say_last(const Word& own) {
  if (transport_.ranks() > 1) conversation_.say(own);
  take_until([&] { return have_parted(); }, std::min<Clock::duration>(kAnswer, patience_));
}

template <typename Condition>
void CollectiveLoop::take_until(Condition condition, Clock::duration most) {
  const Clock::time_point end = Clock::now() + most;
  while (Clock::now() < end && !condition()) {
    queue_.go_round();
    if (!take_tickets()) std::this_thread::sleep_for(microseconds(200));
  }
}

std::vector<std::uint32_t> CollectiveLoop::unanswering() const {
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t rank = 0; rank < transport_.ranks(); ++rank) {
    if (rank != transport_.rank() && !conversation_.has_answered(rank)) ranks.push_back(rank);
  }
  return ranks;
}

// Null: it has not come to it, or that was long ago.
const Word* CollectiveLoop::announced_by(std::uint32_t rank, std::uint64_t number) const {
  if (rank != transport_.rank()) return conversation_.word(rank, number);
  const Word& own = own_[number % kAhead];
  return number < announced_ && own.number == number ? &own : nullptr;
}

// Others may go on for hours, and the library waits for them at the end of the process. One that does not even answer
// is not waited for.
void CollectiveLoop::leave() {
  ended_ = true;
  Word own;
  own.what = Word::What::kLeft;
  own.number = own.failed = announced_;
  say_last(own);
  take_until([&] { return have_parted() || unanswering().empty(); }, patience_);
  if (have_parted()) {
    lets_go_ = transport_.close(Parting::kTogether);
  } else if (const auto silent = unanswering(); silent.empty()) {
    lets_go_ = transport_.close(Parting::kEarly);
  } else {
    log(LogLevel::kWarning, lost_at_the_end(silent, hosts_, patience_seconds_));
    lets_go_ = transport_.close(Parting::kLost);
  }
}

}  // namespace spillway
