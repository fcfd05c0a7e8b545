// Misspelled keys and wrong types, made from the table and from the corpus with a seed: none is taken, and nearly all
// are answered with the key or the type that was meant.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidjson/document.h>
#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <iterator>
#include <random>
#include <set>

#include "tests/seed.h"
#include "tests/tools/config/files.h"
#include "tests/tools/config/schema_check.h"

namespace spillway {
namespace {

constexpr int kMistakes = 1'600;
constexpr double kRight = 0.95;

// A key of a configuration of the corpus that loads.
struct CorpusKey {
  const rapidjson::Document* document;
  std::string path;  // "optimizer.params.lr"
  const rapidjson::Value* value;
};

void add_places(const rapidjson::Value& object, const std::string& section, const rapidjson::Document& document,
                std::vector<CorpusKey>& places) {
  for (const auto& member : object.GetObject()) {
    const std::string path = (section.empty() ? "" : section + ".") + member.name.GetString();
    const ConfigKey* row = find_config_key(path);
    if (row == nullptr) continue;
    places.push_back({&document, path, &member.value});
    if (row->kind == KeyKind::kSection && member.value.IsObject()) add_places(member.value, path, document, places);
  }
}

std::string written(const rapidjson::Document& document) {
  rapidjson::StringBuffer buffer;
  rapidjson::Writer<rapidjson::StringBuffer> writer(buffer);
  document.Accept(writer);
  return buffer.GetString();
}

class Mistakes {
 public:
  explicit Mistakes(std::uint64_t seed) : random_(seed) {
    for (const auto& [name, text, loads, expected] : published_configs()) {
      if (!loads) continue;
      auto& document = documents_.emplace_back(std::make_unique<rapidjson::Document>());
      document->Parse<rapidjson::kParseCommentsFlag | rapidjson::kParseTrailingCommasFlag>(text.c_str());
      add_places(*document, "", *document, places_);
    }
    std::ranges::copy_if(places_, std::back_inserter(choices_), [](const CorpusKey& place) {
      return find_config_key(place.path)->kind == KeyKind::kChoice && place.value->IsString() &&
             std::string_view(place.value->GetString()) != "auto";
    });
  }

  struct Mistake {
    std::string text;      // of the whole file
    std::string kind, at;  // for a message
    std::string expected;  // what the error has to say, first of all
  };

  // Nothing when this place has no such mistake: the letter that is left out leaves a key that exists.
  std::optional<Mistake> next(int kind) {
    const std::vector<CorpusKey>& places = kind == kWrongWord ? choices_ : places_;
    const CorpusKey& place = places[random_() % places.size()];
    const ConfigKey& row = *find_config_key(place.path);
    rapidjson::Document copy;
    copy.CopyFrom(*place.document, copy.GetAllocator());
    rapidjson::Value* section = &copy;
    std::string left = place.path;
    for (std::size_t dot; (dot = left.find('.')) != std::string::npos; left.erase(0, dot + 1)) {
      section = &(*section)[left.substr(0, dot).c_str()];
    }
    const auto member = section->FindMember(left.c_str());
    auto& allocator = copy.GetAllocator();
    Mistake mistake{.text = {}, .kind = kKinds[static_cast<std::size_t>(kind)], .at = place.path, .expected = {}};
    if (kind == kWrongType) {
      const std::string wanted = spoil(row, member->value, allocator);
      if (wanted.empty()) return std::nullopt;
      mistake.expected = place.path + ": expected " + wanted;
    } else if (kind == kWrongSection) {
      rapidjson::Value value(member->value, allocator), name(left.c_str(), allocator);
      section->RemoveMember(member);
      rapidjson::Value* other = wrong_section(copy, place.path, left);
      if (other == nullptr) return std::nullopt;
      other->AddMember(name, value, allocator);
      mistake.expected = "closest key: " + place.path;
    } else if (kind == kWrongWord) {
      const std::string word = member->value.GetString(), spelled = misspelled(word, static_cast<int>(random_() % 4));
      const auto words = choices_of(row.allowed);
      const auto same = [](const std::string& other) {
        return [&](std::string_view w) { return same_word(w, other); };
      };
      if (std::any_of(words.begin(), words.end(), same(spelled))) return std::nullopt;
      member->value.SetString(spelled.c_str(), allocator);
      mistake.expected = place.path + ": the string \"" + spelled + "\" is not known here; closest: " +
                         std::string(*std::find_if(words.begin(), words.end(), same(word)));
    } else {
      const std::string name = misspelled(left, kind);
      const std::string path = place.path.substr(0, place.path.size() - left.size()) + name;
      if (name == left || find_config_key(path) != nullptr) return std::nullopt;
      member->name.SetString(name.c_str(), allocator);
      mistake.expected = "unknown key \"" + path + "\"; closest key: " + left;
    }
    mistake.text = written(copy);
    return mistake;
  }

  static constexpr std::array<const char*, 8> kKinds = {"swapped letters", "dropped letter", "doubled letter",
                                                        "wrong letter",    "wrong case",     "wrong section",
                                                        "wrong type",      "wrong word"};
  static constexpr int kWrongSection = 5, kWrongType = 6, kWrongWord = 7;

 private:
  std::string misspelled(std::string name, int kind) {
    const std::size_t at = random_() % name.size();
    switch (kind) {
      case 0:
        if (at + 1 < name.size()) std::swap(name[at], name[at + 1]);
        return name;
      case 1: return name.size() > 2 ? name.erase(at, 1) : name;
      case 2: return name.insert(at, 1, name[at]);
      case 3: name[at] = static_cast<char>('a' + random_() % 26); return name;
      default:
        for (std::size_t i = random_() % 2 == 0 ? 0 : at; i < name.size(); ++i) {
          name[i] = static_cast<char>(std::toupper(static_cast<unsigned char>(name[i])));
          if (random_() % 2 == 0) break;
        }
        return name;
    }
  }

  // A section where the key has no row; keys whose name stands in several sections are left to where they belong.
  rapidjson::Value* wrong_section(rapidjson::Document& document, const std::string& path, const std::string& leaf) {
    constexpr std::array<const char*, 6> kSections = {"", "zero_optimization", "aio", "fp16", "spillway", "checkpoint"};
    const std::string section = kSections[random_() % kSections.size()];
    const std::string home(parent_of(path));
    if (section == home || path.starts_with(section + ".") || section == leaf) return nullptr;
    if (find_config_key(section.empty() ? leaf : section + "." + leaf) != nullptr) return nullptr;
    if (section.empty()) return &document;
    if (!document.HasMember(section.c_str())) {
      document.AddMember(rapidjson::Value(section.c_str(), document.GetAllocator()),
                         rapidjson::Value(rapidjson::kObjectType), document.GetAllocator());
    }
    rapidjson::Value& there = document[section.c_str()];
    return there.IsObject() ? &there : nullptr;  // an older file may say true in its place
  }

  // Puts a value of another type there. Returns how the error has to begin to say what would be right.
  std::string spoil(const ConfigKey& row, rapidjson::Value& value, rapidjson::Document::AllocatorType& allocator) {
    switch (row.kind) {
      case KeyKind::kBool: value.SetString("yes", allocator); return "true or false";
      case KeyKind::kInteger:
        random_() % 2 == 0 ? value.SetString("12", allocator) : value.SetBool(true);
        return "a whole number";
      case KeyKind::kNumber:
        random_() % 2 == 0 ? value.SetString("1e-4", allocator) : value.SetArray();
        return "a number";
      case KeyKind::kText: value.SetInt(7); return "a string";
      case KeyKind::kSection: row.flag_of.empty() ? value.SetBool(true) : value.SetInt(2); return "an object";
      case KeyKind::kObject:
      case KeyKind::kOff: value.SetBool(true); return "an object";
      case KeyKind::kChoice: value.SetInt(2); return "one of the words";
      case KeyKind::kOnly: value.SetInt(2); return "expected " + std::string(row.allowed);
      case KeyKind::kPair: value.SetDouble(0.9); return "two numbers";
      case KeyKind::kBytes: value.SetString("much", allocator); return "bytes";
      case KeyKind::kTexts: value.SetString("one", allocator); return "an array of strings";
      case KeyKind::kNumbers: value.SetDouble(1); return "an array of numbers";
      case KeyKind::kSections: value.SetObject(); return "an array of objects";
    }
    return {};
  }

  std::mt19937_64 random_;
  std::vector<std::unique_ptr<rapidjson::Document>> documents_;
  std::vector<CorpusKey> places_, choices_;
};

TEST(ConfigTypos, NoneIsTakenAndNearlyAllAreAnsweredWithWhatWasMeant) {
  const Silence silence;
  const SchemaCheck schema;
  Mistakes mistakes(test_seed());
  std::array<int, Mistakes::kKinds.size()> made{}, right{};
  std::string wrong;
  for (int i = 0; i < kMistakes; ++i) {
    const int kind = i % static_cast<int>(Mistakes::kKinds.size());
    const auto mistake = mistakes.next(kind);
    if (!mistake) continue;
    const std::string errors = errors_in(mistake->text);
    ASSERT_NE(errors, "") << mistake->kind << " at " << mistake->at << " was taken:\n" << mistake->text;
    EXPECT_FALSE(schema.accepts(mistake->text)) << mistake->kind << " at " << mistake->at << "\n" << mistake->text;
    ++made[static_cast<std::size_t>(kind)];
    // What was meant, and not the beginning of a longer word.
    const std::size_t found = errors.find(mistake->expected);
    const std::size_t end = found + mistake->expected.size();
    const bool whole =
        found != std::string::npos && (end == errors.size() || !(std::isalnum(errors[end]) || errors[end] == '_'));
    right[static_cast<std::size_t>(kind)] += whole;
    if (!whole) wrong += mistake->kind + " at " + mistake->at + ": wanted " + mistake->expected + "\n" + errors;
  }
  int all = 0, all_right = 0;
  for (std::size_t kind = 0; kind < made.size(); ++kind) {
    std::printf("%-16s %4d made, %4d answered with what was meant\n", Mistakes::kKinds[kind], made[kind], right[kind]);
    EXPECT_GT(made[kind], 30) << Mistakes::kKinds[kind];
    all += made[kind];
    all_right += right[kind];
  }
  std::printf("%d mistakes, %.1f %% answered with what was meant\n", all, 100.0 * all_right / all);
  EXPECT_GE(all, 500);
  EXPECT_GE(all_right, kRight * all) << wrong;
}

}  // namespace
}  // namespace spillway
