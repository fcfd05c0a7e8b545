#include "tools/plan/report.h"
#include "tools/terminal/json.h"

namespace spillway::planning {
namespace {

class Writer : terminal::Json {
 public:
  explicit Writer(const Report& report) : report_(report) {}

  std::string write() {
    write_model();
    if (report_.prediction) {
      write_memory(report_.prediction->plan.ledger);
      if (report_.run.ranks.all > 1) write_ranks();
      write_step(*report_.prediction);
    } else {
      put("refused", report_.refused);
    }
    write_rates();
    if (report_.life) write_life(*report_.life);
    write_alternatives();
    put("planning_seconds", report_.seconds);
    return text();
  }

 private:
  void write_model() {
    put("model", [&] {
      put("name", report_.model);
      put("family", report_.shape.family);
      put("parameters", report_.parameters);
      put("layers", report_.shape.layers);
      if (report_.shape.encodes()) put("decoder_layers", report_.shape.decoder_layers);
      put("width", report_.shape.width);
      put("dtype", spillway::name_of(report_.config.weights));
      put("sequence", report_.run.sequence);
      put("loop", report_.run.loop == Loop::kPyTorch ? "pytorch" : "finetune");
      put("tokens_per_step", report_.tokens);
      put("exact", report_.estimates.empty());
      put("estimates", report_.estimates);
    });
    put("device", report_.device);
    put("placement", [&] {
      put("states", name_of(report_.config.states));
      put("parameters", name_of(report_.config.parameters));
    });
    put("facts", report_.facts);
  }

  void write_memory(const Ledger& ledger) {
    put("memory", [&] {
      for (const Placement tier : {Placement::kHbm, Placement::kHost, Placement::kNvme}) {
        put(name_of(tier), [&] {
          put("bytes", ledger.total(tier));
          put("budget_bytes", tier == Placement::kHbm    ? ledger.hbm_budget
                              : tier == Placement::kHost ? ledger.host_budget
                                                         : ledger.nvme_budget);
          put("purposes", [&] {
            for (const Reservation& line : ledger.reservations) {
              if (line.tier == tier) put(line.purpose, line.bytes);
            }
          });
        });
      }
    });
  }

  void write_ranks() {
    put("ranks", [&] {
      put("count", report_.run.ranks.all);
      put("on_a_host", report_.run.ranks.on_a_host);
      for (const RanksMemory& row : ranks_memory(report_)) {
        put(name_of(row.tier), [&] {
          put("rank_bytes", row.of_a_rank);
          put("host_bytes", row.of_a_host);
          put("all_bytes", row.of_all);
        });
      }
    });
  }

  void write_info(const char* key, const StepInfo& facts) {
    put(key, [&] {
      put("seconds", facts.seconds);
      put("nvme_read_bytes", facts.traffic.nvme_read);
      put("nvme_write_bytes", facts.traffic.nvme_write);
      put("h2d_bytes", facts.traffic.h2d);
      put("d2h_bytes", facts.traffic.d2h);
      if (report_.run.ranks.all == 1) return;
      put("network_gathered_bytes", facts.traffic.gathered);
      put("network_scattered_bytes", facts.traffic.scattered);
      put("network_norm_bytes", facts.traffic.leaves);
    });
  }

  void write_step(const Prediction& made) {
    write_info("step", made.step);
    // While clipping has an effect, nothing is updated on a guess.
    write_info("clipped_step", made.clipped);
    const Schedule& schedule = made.schedule;
    put("schedule", [&] {
      put("seconds", schedule.seconds());
      put("limit", spillway::name_of(schedule.limit()));
      put("busy_seconds", [&] {
        for (std::size_t l = 0; l < kLinks; ++l) put(spillway::name_of(static_cast<Link>(l)), schedule.busy[l]);
      });
      put("stall_seconds", [&] {
        for (std::size_t s = 0; s <= static_cast<std::size_t>(StallCause::kCommit); ++s)
          put(kStallNames[s], schedule.stalls.of[s]);
        put(kStallNames[static_cast<std::size_t>(StallCause::kNetwork)], schedule.stalls[StallCause::kNetwork]);
        put("sharing_cores", schedule.shared);
      });
      put("tiles", made.plan.tiles.size());
      put("joined_tiles", made.joined);
    });
    put("commit_every", made.commit_every);
    put("commit_seconds", made.commit_seconds);
    put("speculative_blocks", made.speculative);
    put("recomputed_layers", made.visits_recomputed);
    put("tokens_per_second", static_cast<double>(report_.tokens) / made.step.seconds);
  }

  void write_rates() {
    put("rates", [&] {
      for (const RateLine& rate : report_.rates.lines) {
        put(rate.key, [&] {
          put("value", rate.value);
          put("unit", rate.unit);
          put("source", rate.source);
        });
      }
    });
    put("measured", report_.measured);
  }

  void write_life(const DriveLife& life) {
    put("drive", [&] {
      put("written_bytes_per_day", life.bytes_per_day);
      if (life.life_bytes) put("life_bytes", *life.life_bytes);
      if (const auto days = life.days()) put("life_days", *days);
      put("source", life.source);
    });
  }

  void write_bytes(const std::optional<TierBytes>& bytes) {
    if (!bytes) return;
    put("hbm_bytes", bytes->hbm);
    put("host_bytes", bytes->host);
    put("nvme_bytes", bytes->nvme);
  }

  void write_alternatives() {
    list("placements", [&] {
      for (const PlacementRow& row : report_.alternatives.table) item([&] { write_row(row); });
    });
    put("compared_tile_elements", report_.alternatives.tile_elements);
    list("changes", [&] {
      for (const Change& change : report_.alternatives.changes) item([&] { write_change(change); });
    });
  }

  void write_row(const PlacementRow& row) {
    put("states", name_of(row.states));
    put("parameters", name_of(row.parameters));
    put("stages", row.stages);
    put("chosen", row.chosen);
    put("fits", row.refused.empty());
    write_bytes(row.bytes);
    if (row.refused.empty()) {
      put("seconds", row.seconds);
      put("limit", row.limit);
    } else {
      put("refused", row.refused);
    }
  }

  void write_change(const Change& change) {
    put("what", change.what);
    put("effect", change.effect);
    put("seconds", change.seconds);
    write_bytes(change.bytes);
  }

  const Report& report_;
};

}  // namespace

std::string report_json(const Report& report) { return Writer(report).write(); }

}  // namespace spillway::planning
