metadata description = 'A private endpoint of one resource, and its name in a private DNS zone.'

param name string
param location string
param tags object

@description('Resource id of the subnet of the endpoint.')
param subnetId string

@description('Resource id of what it leads to, and the part of it.')
param targetId string
@allowed(['namespace', 'topic'])
param groupId string

@description('Resource id of the private DNS zone; empty: its record is made elsewhere, such as by a policy.')
param dnsZoneId string

resource endpoint 'Microsoft.Network/privateEndpoints@2024-05-01' = {
  name: name
  location: location
  tags: tags
  properties: {
    subnet: {
      id: subnetId
    }
    privateLinkServiceConnections: [
      {
        name: name
        properties: {
          privateLinkServiceId: targetId
          groupIds: [
            groupId
          ]
        }
      }
    ]
  }
}

resource record 'Microsoft.Network/privateEndpoints/privateDnsZoneGroups@2024-05-01' = if (!empty(dnsZoneId)) {
  parent: endpoint
  name: 'default'
  properties: {
    privateDnsZoneConfigs: [
      {
        name: groupId
        properties: {
          privateDnsZoneId: dnsZoneId
        }
      }
    ]
  }
}
