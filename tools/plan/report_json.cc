#include <rapidjson/prettywriter.h>
#include <rapidjson/stringbuffer.h>

#include "tools/plan/report.h"

namespace spillway::planning {
namespace {

class Json {
 public:
  explicit Json(const Report& report) : report_(report) {}

  std::string write() {
    json_.SetIndent(' ', 2);
    json_.StartObject();
    write_model();
    if (report_.prediction) {
      write_memory(report_.prediction->plan.ledger);
      write_step(*report_.prediction);
    } else {
      text("refused", report_.refused);
    }
    write_rates();
    if (report_.life) write_life(*report_.life);
    write_alternatives();
    number("planning_seconds", report_.seconds);
    json_.EndObject();
    return buffer_.GetString();
  }

 private:
  void text(const char* key, const std::string& value) {
    json_.Key(key);
    json_.String(value.data(), static_cast<rapidjson::SizeType>(value.size()));
  }
  void number(const char* key, double value) {
    json_.Key(key);
    json_.Double(value);
  }
  void count(const char* key, std::uint64_t value) {
    json_.Key(key);
    json_.Uint64(value);
  }
  void flag(const char* key, bool value) {
    json_.Key(key);
    json_.Bool(value);
  }
  void list(const char* key, const std::vector<std::string>& values) {
    json_.Key(key);
    json_.StartArray();
    for (const std::string& value : values) json_.String(value.data(), static_cast<rapidjson::SizeType>(value.size()));
    json_.EndArray();
  }
  template <typename Members>
  void object(const char* key, const Members& members) {
    json_.Key(key);
    json_.StartObject();
    members();
    json_.EndObject();
  }

  void write_model() {
    object("model", [&] {
      text("name", report_.model);
      text("family", report_.shape.family);
      count("parameters", report_.parameters);
      count("layers", report_.shape.layers);
      if (report_.shape.encodes()) count("decoder_layers", report_.shape.decoder_layers);
      count("width", report_.shape.width);
      text("dtype", std::string(spillway::name_of(report_.config.weights)));
      count("sequence", report_.run.sequence);
      text("loop", report_.run.loop == Loop::kPyTorch ? "pytorch" : "finetune");
      count("tokens_per_step", report_.tokens);
      flag("exact", report_.estimates.empty());
      list("estimates", report_.estimates);
    });
    text("device", report_.device);
    object("placement", [&] {
      text("states", name_of(report_.config.states));
      text("parameters", name_of(report_.config.parameters));
    });
    list("facts", report_.facts);
  }

  void write_memory(const Ledger& ledger) {
    object("memory", [&] {
      for (const Placement tier : {Placement::kHbm, Placement::kHost, Placement::kNvme}) {
        object(name_of(tier), [&] {
          count("bytes", ledger.total(tier));
          count("budget_bytes", tier == Placement::kHbm    ? ledger.hbm_budget
                                : tier == Placement::kHost ? ledger.host_budget
                                                           : ledger.nvme_budget);
          object("purposes", [&] {
            for (const Reservation& line : ledger.reservations) {
              if (line.tier == tier) count(line.purpose.c_str(), line.bytes);
            }
          });
        });
      }
    });
  }

  void write_facts(const char* key, const StepFacts& facts) {
    object(key, [&] {
      number("seconds", facts.seconds);
      count("nvme_read_bytes", facts.traffic.nvme_read);
      count("nvme_write_bytes", facts.traffic.nvme_write);
      count("h2d_bytes", facts.traffic.h2d);
      count("d2h_bytes", facts.traffic.d2h);
    });
  }

  void write_step(const Prediction& made) {
    write_facts("step", made.step);
    // While clipping has an effect, nothing is updated on a guess.
    write_facts("clipped_step", made.clipped);
    const Schedule& schedule = made.schedule;
    object("schedule", [&] {
      number("seconds", schedule.seconds());
      text("limit", spillway::name_of(schedule.limit()));
      object("busy_seconds", [&] {
        for (std::size_t l = 0; l < kLinks; ++l) number(spillway::name_of(static_cast<Link>(l)), schedule.busy[l]);
      });
      object("stall_seconds", [&] {
        for (std::size_t s = 0; s < kStalls; ++s) number(spillway::name_of(static_cast<Stall>(s)), schedule.stalls[s]);
        number("sharing_cores", schedule.shared);
      });
      count("tiles", made.plan.tiles.size());
      count("joined_tiles", made.joined);
    });
    count("commit_every", made.commit_every);
    number("commit_seconds", made.commit_seconds);
    count("speculative_blocks", made.speculative);
    count("recomputed_layers", made.visits_recomputed);
    number("tokens_per_second", static_cast<double>(report_.tokens) / made.step.seconds);
  }

  void write_rates() {
    object("rates", [&] {
      for (const RateLine& rate : report_.rates.lines) {
        object(rate.key.c_str(), [&] {
          number("value", rate.value);
          text("unit", rate.unit);
          text("source", rate.source);
        });
      }
    });
    list("measured", report_.measured);
  }

  void write_life(const DriveLife& life) {
    object("drive", [&] {
      number("written_bytes_per_day", life.bytes_per_day);
      if (life.life_bytes) number("life_bytes", *life.life_bytes);
      if (const auto days = life.days()) number("life_days", *days);
      text("source", life.source);
    });
  }

  void write_bytes(const std::optional<TierBytes>& bytes) {
    if (!bytes) return;
    count("hbm_bytes", bytes->hbm);
    count("host_bytes", bytes->host);
    count("nvme_bytes", bytes->nvme);
  }

  void write_alternatives() {
    json_.Key("placements");
    json_.StartArray();
    for (const PlacementRow& row : report_.alternatives.table) {
      json_.StartObject();
      text("states", name_of(row.states));
      text("parameters", name_of(row.parameters));
      text("stages", row.stages);
      flag("chosen", row.chosen);
      flag("fits", row.refused.empty());
      write_bytes(row.bytes);
      if (row.refused.empty()) {
        number("seconds", row.seconds);
        text("limit", row.limit);
      } else {
        text("refused", row.refused);
      }
      json_.EndObject();
    }
    json_.EndArray();
    count("compared_tile_elements", report_.alternatives.tile_elements);
    json_.Key("changes");
    json_.StartArray();
    for (const Change& change : report_.alternatives.changes) {
      json_.StartObject();
      text("what", change.what);
      number("effect", change.effect);
      number("seconds", change.seconds);
      write_bytes(change.bytes);
      json_.EndObject();
    }
    json_.EndArray();
  }

  const Report& report_;
  rapidjson::StringBuffer buffer_;
  rapidjson::PrettyWriter<rapidjson::StringBuffer> json_{buffer_};
};

}  // namespace

std::string report_json(const Report& report) { return Json(report).write(); }

}  // namespace spillway::planning
