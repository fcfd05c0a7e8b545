// What a store says of itself, whose checksum is checked elsewhere.
#include "src/plan/description.h"

#include "src/formats/plain_file.h"
#include "tests/fuzz/targets.h"

namespace spillway::fuzz {

void store_description(Bytes input) {
  const std::string text(text_of(input));
  const auto stored = accepted([&] { return parse_store_description(text, "spillway.store"); });
  if (!stored) return;
  SPILLWAY_CHECK(stored->tile_elements > 0 && stored->tile_elements % 1024 == 0, "tiles are whole units");
  for (const Attachment& attachment : stored->model.attachments) {
    const auto path = std::filesystem::path("/exported/model") / attachment.name;
    SPILLWAY_CHECK(path.lexically_normal().parent_path() == "/exported/model", "no path leaves the directory");
    SPILLWAY_CHECK(is_plain_file_name(attachment.name), "an attachment is a file of its directory");
  }
  const Config config = config_of(*stored);
  const StoreIdentity again = describe_store(config, stored->model);
  SPILLWAY_CHECK(again.fingerprint == stored->fingerprint, "the same model has the same fingerprint");
  SPILLWAY_CHECK(description_difference(text, again.description).empty(), "and is the same when it is read again");
  const StoredModel back = parse_store_description(again.description, "spillway.store");
  SPILLWAY_CHECK(describe_store(config, back.model).description == again.description, "byte for byte");
}

}  // namespace spillway::fuzz
